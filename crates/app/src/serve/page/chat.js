// The chat: messages, a stream that fills the last of them, and figures of it.

const chat = { messages: [], stopper: null, model: null };

/** Calls `take` with each event of a stream of server-sent events. */
async function readEvents(body, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (waiting + value).split("\n");
    waiting = lines.pop();
    for (const line of lines) {
      const data = /^data: ?(.*?)\r?$/.exec(line);
      if (data && data[1] !== "[DONE]") take(JSON.parse(data[1]));
    }
  }
}

function chatRequest() {
  const sent = chat.messages.filter((message) => !message.failed).map(({ role, content, reasoning, calls, callId }) => ({
    role,
    content,
    ...(reasoning ? { reasoning_content: reasoning } : {}),
    ...(calls?.length ? { tool_calls: calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } })) } : {}),
    ...(callId ? { tool_call_id: callId } : {}),
  }));
  const system = $("system").value.trim();
  const request = {
    messages: system ? [{ role: "system", content: system }, ...sent] : sent,
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
  };
  if ($("model").value) request.model = $("model").value;
  for (const [id, name] of [["temperature", "temperature"], ["top-p", "top_p"], ["max-tokens", "max_tokens"], ["seed", "seed"]]) {
    if ($(id).value !== "") request[name] = Number($(id).value);
  }
  if ($("thinking").value) request.chat_template_kwargs = { enable_thinking: $("thinking").value === "on" };
  const tools = $("tools").value.trim();
  if (tools) request.tools = JSON.parse(tools);
  return request;
}

async function generate() {
  let request;
  try {
    request = chatRequest();
  } catch (error) {
    tell(`The tools are no JSON: ${error.message}`, true);
    return;
  }
  const message = { role: "assistant", content: "", reasoning: "", calls: [] };
  chat.messages.push(message);
  chat.stopper = new AbortController();
  buttons();
  const figures = liveFigures(message);
  draw();
  try {
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(request),
      signal: chat.stopper.signal,
    });
    message.trace = response.headers.get("x-th-trace-id");
    await readEvents(response.body, (event) => {
      take(message, event, figures);
      draw();
    });
    if (!message.finish && !message.failed) message.failed = "the stream ended early";
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else message.failed = error.message;
  }
  figures.end();
  chat.stopper = null;
  if (message.failed) tell(message.failed, true);
  buttons();
  draw();
  save();
}

/** What one event of the stream says. */
function take(message, event, figures) {
  if (event.error) {
    message.failed = event.error.message ?? "the server failed";
    return;
  }
  if (event.prompt_progress) figures.prefill(event.prompt_progress);
  if (event.timings) message.timings = event.timings;
  for (const choice of event.choices ?? []) {
    const delta = choice.delta ?? {};
    if (delta.content || delta.reasoning_content || delta.tool_calls) figures.token();
    message.reasoning += delta.reasoning_content ?? "";
    message.content += delta.content ?? "";
    for (const piece of delta.tool_calls ?? []) {
      const call = (message.calls[piece.index] ??= { id: "", name: "", arguments: "" });
      call.id ||= piece.id ?? "";
      call.name += piece.function?.name ?? "";
      call.arguments += piece.function?.arguments ?? "";
    }
    if (choice.finish_reason) message.finish = choice.finish_reason;
  }
}

/** While an answer streams: what the server's own counters say of the last half second. */
function liveFigures(message) {
  const begun = performance.now();
  let last = null;
  const look = async () => {
    let status;
    try {
      status = await askJson("/status");
    } catch {
      return;
    }
    const now = { at: performance.now(), output: status.tokens?.output ?? 0, rounds: status.rounds?.count ?? 0 };
    if (last && chat.stopper && now.rounds > last.rounds) {
      const tokens = now.output - last.output;
      const rate = (tokens * 1000) / (now.at - last.at);
      tell(`the server gives ${number(rate)} tok/s · ${number(tokens / (now.rounds - last.rounds), 2)} tokens/round`);
    }
    last = now;
  };
  const timer = setInterval(look, 500);
  look();
  return {
    prefill: ({ processed, total }) => tell(`reading the prompt: ${processed} of ${total} tokens`),
    token: () => { message.first ??= performance.now() - begun; },
    end: () => {
      clearInterval(timer);
      tell("");
    },
  };
}

function timingsLine({ timings, first }) {
  const parts = [
    `${timings.predicted_n} tokens`,
    `${number(timings.predicted_per_second)} tok/s`,
    timings.rounds ? `${number(timings.tokens_per_round, 2)} tokens/round` : null,
    `first token ${duration(first)}`,
    `prompt ${timings.prompt_n + timings.cache_n} (${timings.cache_n} cached)`,
    Number.isFinite(timings.floor_share) ? `${share(timings.floor_share)} of the floor's rate` : null,
  ];
  return parts.filter(Boolean).join(" · ");
}

function tell(text, bad = false) {
  $("live").textContent = text;
  $("live").classList.toggle("bad", bad);
}

let drawing = false;

/** Draws the conversation, at most once a frame. */
function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const log = $("log");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    chat.messages.forEach((message, index) => {
      const old = log.children[index];
      const last = index === chat.messages.length - 1;
      // Only the last message changes.
      if (old && old.message === message && !last && !old.live) return;
      const node = messageNode(message, last, old?.message === message ? old : null);
      node.message = message;
      node.live = last;
      if (old) old.replaceWith(node);
      else log.append(node);
    });
    while (log.children.length > chat.messages.length) log.lastChild.remove();
    if (atEnd) log.scrollTop = log.scrollHeight;
  });
}

function messageNode(message, last, old) {
  const who = { user: "You", assistant: "Model", tool: "Tool result" }[message.role];
  const node = make("article", { class: `message ${message.role}` }, make("div", { class: "who" }, who));
  if (message.reasoning) {
    const open = old?.querySelector("details")?.open ?? false;
    const state = message.content || message.finish ? "Thoughts" : "Thinking…";
    node.append(make("details", { open }, make("summary", {}, state), make("div", { class: "text" }, ...nodes(parseMarkdown(message.reasoning)))));
  }
  const text = message.role === "assistant" ? nodes(parseMarkdown(message.content)) : [message.content];
  if (message.content) node.append(make("div", { class: "text" }, ...text));
  for (const call of (message.calls ?? []).filter(Boolean)) node.append(callNode(call));
  if (last && message.finish === "tool_calls" && message.calls.length) node.append(resultForm(message));
  if (message.failed) node.append(make("p", { class: "bad" }, message.failed));
  if (message.finish && message.finish !== "stop") node.append(make("p", { class: "figures" }, `ended: ${message.finish}`));
  if (message.timings) node.append(make("p", { class: "figures" }, timingsLine(message)));
  return node;
}

function callNode(call) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch { /* not complete yet */ }
  return make("div", { class: "call" }, make("b", {}, `calls ${call.name}`), make("pre", {}, make("code", {}, shown)));
}

/** Asks for what the tools gave, and goes on with it. */
function resultForm(message) {
  const fields = message.calls.map((call) => [call, make("textarea", { rows: 2, "aria-label": `Result of ${call.name}` })]);
  const send = (event) => {
    event.preventDefault();
    for (const [call, field] of fields) chat.messages.push({ role: "tool", content: field.value, callId: call.id });
    generate();
  };
  return make("form", { on: { submit: send } }, ...fields.flatMap(([call, field]) => [make("div", { class: "hint" }, `Result of ${call.name}`), field]),
    make("button", {}, "Give results"));
}

function buttons() {
  const busy = chat.stopper !== null;
  $("send").disabled = busy;
  $("stop").disabled = !busy;
  $("again").disabled = busy || !chat.messages.some((message) => message.role === "assistant");
}

function save() {
  kept.set("chat", JSON.stringify(chat.messages));
}

function send(event) {
  event?.preventDefault();
  const text = $("input").value;
  if (chat.stopper || text.trim() === "") return;
  $("input").value = "";
  chat.messages.push({ role: "user", content: text });
  generate();
}

function regenerate() {
  if (chat.stopper) return;
  while (chat.messages.length && chat.messages[chat.messages.length - 1].role === "assistant") chat.messages.pop();
  if (chat.messages.length) generate();
}

function startChat() {
  $("composer").addEventListener("submit", send);
  $("input").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  $("chat").addEventListener("keydown", (event) => {
    if (event.key === "Escape") chat.stopper?.abort();
  });
  $("stop").addEventListener("click", () => {
    chat.stopper?.abort();
    $("input").focus();
  });
  $("again").addEventListener("click", regenerate);
  $("fresh").addEventListener("click", () => {
    chat.stopper?.abort();
    chat.messages = [];
    tell("");
    buttons();
    draw();
    save();
    $("input").focus();
  });
  try {
    chat.messages = JSON.parse(kept.get("chat") ?? "[]");
  } catch { /* what was kept is of no use */ }
  buttons();
  draw();
}

async function loadModels() {
  const models = (await askJson("/v1/models")).data ?? [];
  $("model").replaceChildren(...models.map((model) => make("option", { value: model.id }, model.id)));
}
