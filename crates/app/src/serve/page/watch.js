// The observability tab: how the server is now, was lately, and what each request's time went to.

const watching = { before: null, status: null };

function tile(name, value, bad = false) {
  return make("div", { class: "tile" }, make("b", { class: bad ? "bad" : null }, value), make("span", {}, name));
}

/** What happened between two looks at the status; nothing is known if counters began again. */
function rates(old, now) {
  const seconds = old ? (now.at - old.at) / 1000 : 0;
  const tokens = (now.tokens?.output ?? 0) - (old?.tokens?.output ?? 0);
  const rounds = (now.rounds?.count ?? 0) - (old?.rounds?.count ?? 0);
  if (!(seconds > 0) || tokens < 0 || rounds < 0) return {};
  const spent = (now.rounds?.seconds ?? 0) - (old.rounds?.seconds ?? 0);
  return { rate: tokens / seconds, perRound: tokens / rounds, roundMs: (spent * 1000) / rounds };
}

function drawStatus(status) {
  const { rate, perRound, roundMs } = rates(watching.status, status);
  watching.status = status;
  const floorMs = (status.device?.round_bytes / status.device?.read_bandwidth) * 1000;
  const over = Number.isFinite(roundMs / floorMs) ? ` (${number(roundMs / floorMs, 2)}x floor)` : "";
  const traces = status.traces ?? {};
  $("tiles").replaceChildren(
    tile("state", status.reason ? `${status.status}: ${status.reason}` : status.status, status.status !== "ok"),
    tile("tokens/s out", number(rate)),
    tile("tokens/round", number(perRound, 2)),
    tile("round", duration(roundMs) + over),
    tile("lanes", `${status.lanes?.running ?? 0} of ${status.lanes?.total ?? 0}`),
    tile("waiting", `${status.queue?.waiting ?? 0} of ${status.queue?.limit ?? 0}`),
    tile("pages used", `${status.cache?.pages_used ?? 0} of ${status.cache?.pages ?? 0}`),
    tile("checkpoints", `${status.cache?.checkpoints ?? 0} (${bytes(status.cache?.checkpoint_bytes ?? 0)})`),
    tile("prompt tokens cached", share(status.cache?.hit_share)),
    tile("memory", bytes(status.memory?.total_bytes)),
    tile("traces", traces.error ?? `${traces.state ?? "–"}, ${traces.written ?? 0} written, ${traces.lost ?? 0} lost`, traces.state === "failing"));
  const lanes = Array.from({ length: Math.min(status.lanes?.total ?? 0, 256) }, (_, lane) => make("i", { class: lane < status.lanes.running ? "busy" : null }));
  $("lanes").replaceChildren(...lanes);
  $("lanes").setAttribute("aria-hidden", "true");
}

function drawServer(status) {
  const model = status.model ? `${status.model.name}${status.model.draft ? ` with ${status.model.draft}` : ""} on ${status.device?.name}` : "no model in memory";
  $("server").textContent = `${status.reason ? `${status.status}: ${status.reason}` : status.status} · ${model}`;
  $("server").classList.toggle("bad", !["ok", "released"].includes(status.status));
}

function query(more = {}) {
  const asked = { since: $("range").value, outcome: $("outcome").value, client: $("client").value.trim(), ...more };
  const known = Object.entries(asked).filter(([, value]) => value !== "" && value !== null);
  return new URLSearchParams(known).toString();
}

function drawStats({ stats }) {
  const of = (get) => stats.series.map(get);
  const starts = of((interval) => interval.start_us);
  const plain = (value) => (value >= 100 || value === 0 ? value.toFixed(0) : value.toFixed(1));
  $("charts").replaceChildren(
    chart("Output tokens/s, all lanes", [{ name: "tokens/s", kind: "bar", values: of((i) => i.output_tokens_per_second) }], starts, plain),
    chart("Time to first token", [
      { name: "p50", kind: "line", values: of((i) => i.first_token_ms.p50) },
      { name: "p95", kind: "line", second: true, values: of((i) => i.first_token_ms.p95) },
    ], starts, duration),
    chart("Duration", [
      { name: "p50", kind: "line", values: of((i) => i.duration_ms.p50) },
      { name: "p95", kind: "line", second: true, values: of((i) => i.duration_ms.p95) },
    ], starts, duration),
    chart("Requests", [
      { name: "all", kind: "bar", values: of((i) => i.requests) },
      { name: "failed", kind: "bar", second: true, values: of((i) => i.errors) },
    ], starts, plain));
  const groups = [["all", stats.total], ...Object.entries(stats.models).map(([name, s]) => [`model ${name}`, s]), ...Object.entries(stats.clients).map(([name, s]) => [`client ${name}`, s])];
  fill($("groups"), ["", "requests", "failed", "retries", "first p50", "p95", "p99", "total p50", "p95", "p99", "tok/s", "tok/round", "cached"],
    groups.map(([name, s]) => [name, s.requests, share(s.error_rate), s.retries,
      ...["p50", "p95", "p99"].map((p) => duration(s.first_token_ms[p] ?? NaN)),
      ...["p50", "p95", "p99"].map((p) => duration(s.duration_ms[p] ?? NaN)),
      number(s.tokens_per_second), number(s.tokens_per_round, 2), share(s.cache_hit_share)]));
}

function fill(table, titles, rows) {
  const head = make("thead", {}, make("tr", {}, ...titles.map((title) => make("th", { scope: "col" }, title))));
  const cell = (value) => make("td", {}, value instanceof Node ? value : String(value));
  const body = rows.length
    ? rows.map((row) => make("tr", {}, ...row.map(cell)))
    : [make("tr", {}, make("td", { colspan: titles.length }, "nothing in this range"))];
  table.replaceChildren(head, make("tbody", {}, ...body));
}

function drawRequests({ traces, next_before }) {
  const focused = document.activeElement?.dataset?.id;
  const perSecond = (r) => (r.decode_us > 0 && r.tokens.output > 0 ? (r.tokens.output * 1e6) / r.decode_us : NaN);
  fill($("requests"), ["time", "outcome", "client", "endpoint", "prompt", "cached", "output", "first token", "total", "tok/s"],
    traces.map((r) => [
      make("button", { type: "button", "data-id": r.span_id, on: { click: () => openTrace(r.span_id) } }, new Date(r.started_us / 1000).toLocaleTimeString()),
      (r.error ? r.error.class : "ok") + (r.retry_of ? " (retry)" : ""),
      r.client, r.endpoint, r.tokens.prompt, r.tokens.cached, r.tokens.output,
      duration((r.first_token_us ?? NaN) / 1000), duration(r.duration_us / 1000), number(perSecond(r)),
    ]));
  // A table that is drawn anew must not take the keyboard's place.
  if (focused) $("requests").querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
  $("older").disabled = next_before === null;
  $("older").dataset.before = next_before ?? "";
  $("newest").disabled = watching.before === null;
}

async function openTrace(id) {
  const place = $("trace");
  try {
    const { requests } = await askJson(`/traces/${id}`);
    place.replaceChildren(closeButton(id), ...requests.flatMap(traceNodes));
  } catch (error) {
    place.replaceChildren(make("p", { class: "bad" }, error.message));
  }
  place.hidden = false;
  place.focus();
  place.scrollIntoView({ block: "nearest" });
}

/** Leaves the trace, back to where it was opened. */
function closeTrace(id) {
  $("trace").hidden = true;
  ($("requests").querySelector(`[data-id="${CSS.escape(id)}"]`) ?? $("range")).focus();
}

function closeButton(id) {
  $("trace").onkeydown = (event) => {
    if (event.key === "Escape") closeTrace(id);
  };
  return make("button", { type: "button", class: "close", on: { click: () => closeTrace(id) } }, "Close");
}

function traceNodes(r) {
  const facts = [
    ["trace", r.trace_id], ["request", `${r.span_id} ${r.request_id}`], ["asked", `${r.endpoint} by ${r.client}`], ["model", r.model],
    ["session", r.session], ["outcome", `${r.error ? `${r.error.class}: ${r.error.message}` : "ok"}, status ${r.status}${r.finish ? ` (${r.finish})` : ""}`],
    ["retry of", r.retry_of],
    ["tokens", `prompt ${r.tokens.prompt} (${r.tokens.cached} cached), output ${r.tokens.output} (${r.tokens.reasoning} reasoning)`],
    ["rounds", r.draft.rounds ? `${r.draft.rounds}, ${number(r.tokens.output / r.draft.rounds, 2)} tokens each; ${r.draft.accepted} of ${r.draft.proposed} proposals accepted` : ""],
    ["cache", [r.cache.source, r.cache.miss].filter(Boolean).join(": ")], ["tools", r.tool_calls.join(", ")],
    ["sampling", Object.keys(r.sampling).length ? JSON.stringify(r.sampling) : ""],
  ].filter(([, value]) => value);
  const bodies = r.bodies ? [["Request", r.bodies.request], ["Answer", r.bodies.response]] : [];
  return [
    make("h2", {}, "Trace"),
    make("dl", {}, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
    make("div", { role: "list", "aria-label": "What its time went to" }, ...waterfall(r)),
    ...bodies.map(([name, text]) => make("details", {}, make("summary", {}, name), make("pre", {}, text))),
  ];
}

/** A bar for each span, in the order in which they are told. */
function waterfall(r) {
  const rows = [];
  const add = (span, depth) => {
    const bar = make("b");
    const percent = (us) => Math.min((us / Math.max(r.duration_us, 1)) * 100, 100);
    bar.style.left = `${percent(span.start_us)}%`;
    bar.style.width = `${Math.min(percent(span.duration_us), 100 - percent(span.start_us))}%`;
    const name = make("span", {}, span.name);
    name.style.paddingLeft = `${depth * 0.7}rem`;
    const details = Object.entries(span.attributes ?? {}).map(([key, value]) => `${key} ${value}`).join(", ");
    const time = duration(span.duration_us / 1000);
    rows.push(make("div", { class: "span", role: "listitem", title: details || null, "aria-label": `${span.name}: ${time}, from ${duration(span.start_us / 1000)}. ${details}` },
      name, make("span", { class: "track" }, bar), make("span", { class: "time" }, time)));
    for (const child of span.children ?? []) add(child, depth + 1);
  };
  add({ name: "request", start_us: 0, duration_us: r.duration_us }, 0);
  for (const span of r.spans) add(span, 1);
  return rows;
}

async function lookAtStatus() {
  const status = { ...(await askJson("/status")), at: performance.now() };
  drawServer(status);
  if (!$("watch").hidden) drawStatus(status);
}

async function lookAtTraces() {
  const before = watching.before === null ? {} : { before: watching.before };
  try {
    const [stats, list] = await Promise.all([
      askJson(`/traces/stats?${query({ intervals: 60 })}`),
      askJson(`/traces?${query({ limit: 50, ...before })}`),
    ]);
    drawStats(stats);
    drawRequests(list);
  } catch (error) {
    $("charts").replaceChildren(make("p", { class: "bad" }, error.message));
  }
}

function startWatch() {
  for (const id of ["range", "outcome", "client"]) {
    $(id).addEventListener("change", () => {
      watching.before = null;
      lookAtTraces();
    });
  }
  $("older").addEventListener("click", () => {
    watching.before = $("older").dataset.before;
    lookAtTraces();
  });
  $("newest").addEventListener("click", () => {
    watching.before = null;
    lookAtTraces();
  });
}
