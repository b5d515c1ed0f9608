// Small things that all parts of the page use. Text from outside only ever becomes text nodes.

const $ = (id) => document.getElementById(id);

/** Makes an element; children are nodes or texts. Attributes that are false or null are left out. */
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    } else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** What is kept for this tab; without storage, for this page. */
const kept = {
  memory: {},
  get(name) {
    try { return sessionStorage.getItem(name); } catch { return this.memory[name] ?? null; }
  },
  set(name, value) {
    try { sessionStorage.setItem(name, value); } catch { this.memory[name] = value; }
  },
};

class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Asks the server; an answer that is no success becomes a ServerError with what the server said. */
async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = kept.get("key");
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401) $("key-form").hidden = false;
  let message = `${path} answered ${response.status}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch { /* not in the API's form: the status has to do */ }
  throw new ServerError(message, response.status);
}

const askJson = async (path) => (await ask(path)).json();

function number(value, digits = 1) {
  return Number.isFinite(value) ? value.toFixed(digits) : "–";
}

function share(value) {
  return Number.isFinite(value) ? `${(value * 100).toFixed(1)} %` : "–";
}

/** A time in a unit that suits it. */
function duration(ms) {
  if (!Number.isFinite(ms)) return "–";
  if (ms < 1) return `${(ms * 1000).toFixed(0)} µs`;
  if (ms < 100) return `${ms.toFixed(1)} ms`;
  if (ms < 10000) return `${ms.toFixed(0)} ms`;
  return ms < 600000 ? `${(ms / 1000).toFixed(1)} s` : `${(ms / 60000).toFixed(1)} min`;
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return Number.isFinite(count) ? `${count.toFixed(unit ? 1 : 0)} ${units[unit]}` : "–";
}
