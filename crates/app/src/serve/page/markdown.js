// Markdown from a model, which may write anything: it becomes a tree of known tags and texts, and
// then nodes. No string is ever read as HTML, and nothing is loaded from elsewhere: pictures are
// links. Scanning is by hand, in time that is linear in the text but for nesting, which is bounded.

const MAX_DEPTH = 8;

/** A tree of {tag, attributes, children} and strings. */
function parseMarkdown(text) {
  return parseBlocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function tree(tag, children, attributes = {}) {
  return { tag, attributes, children };
}

function parseBlocks(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const taken = depth < MAX_DEPTH && (fence(lines, at) ?? heading(line) ?? rule(line) ??
      quote(lines, at, depth) ?? list(lines, at, depth) ?? table(lines, at));
    if (line.trim() === "") {
      at += 1;
    } else if (taken) {
      blocks.push(taken.block);
      at += taken.lines;
    } else {
      const from = at;
      at += 1;
      while (at < lines.length && lines[at].trim() !== "" && !(depth < MAX_DEPTH && interrupts(lines, at))) at += 1;
      blocks.push(tree("p", parseInline(lines.slice(from, at).join("\n"), 0)));
    }
  }
  return blocks;
}

function interrupts(lines, at) {
  const line = lines[at];
  return /^ {0,3}(`{3,}|~{3,}|#{1,6} |>)/.test(line) || rule(line) !== null || /^ {0,3}([-*+]|1[.)]) /.test(line);
}

function fence(lines, at) {
  const open = /^( {0,3})(`{3,}|~{3,})([^`]*)$/.exec(lines[at]);
  if (!open) return null;
  const mark = open[2];
  let end = at + 1;
  const closes = (line) => {
    const bare = line.trim();
    return bare.length >= mark.length && bare === mark[0].repeat(bare.length);
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).map((line) => line.slice(indentOf(line, open[1].length))).join("\n");
  const language = open[3].trim().split(/\s/)[0].slice(0, 40);
  const block = tree("pre", [tree("code", [code])], language ? { "data-language": language } : {});
  return { block, lines: end - at + 1 };
}

function indentOf(line, most) {
  let count = 0;
  while (count < most && line[count] === " ") count += 1;
  return count;
}

function heading(line) {
  const found = /^ {0,3}(#{1,6})[ \t]+(.*)$/.exec(line);
  if (!found) return null;
  const text = found[2].replace(/[ \t]+#+[ \t]*$/, "");
  return { block: tree(`h${found[1].length}`, parseInline(text, 0)), lines: 1 };
}

function rule(line) {
  const bare = line.replace(/[ \t]/g, "");
  const rules = bare.length >= 3 && "-*_".includes(bare[0]) && bare === bare[0].repeat(bare.length);
  return rules ? { block: tree("hr", []), lines: 1 } : null;
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  if (end === at) return null;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return { block: tree("blockquote", parseBlocks(inner, depth + 1)), lines: end - at };
}

const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const ordered = !"-*+".includes(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || !"-*+".includes(item[2]) !== ordered) break;
    const indent = item[1].length + item[2].length + Math.min(Math.max(item[3].length, 1), 4);
    const inner = [lines[end].slice(Math.min(indent, lines[end].length))];
    end += 1;
    while (end < lines.length) {
      const line = lines[end];
      const blank = line.trim() === "";
      const deeper = indentOf(line, indent) >= Math.min(indent, 2);
      if (blank ? !(end + 1 < lines.length && indentOf(lines[end + 1], 2) >= 2) : !deeper) break;
      inner.push(line.slice(indentOf(line, indent)));
      end += 1;
    }
    items.push(tree("li", tight(parseBlocks(inner, depth + 1))));
    // One empty line between items does not end the list.
    if (end + 1 < lines.length && lines[end].trim() === "" && ITEM.test(lines[end + 1])) end += 1;
  }
  const start = ordered && parseInt(first[2], 10) !== 1 ? { start: parseInt(first[2], 10) } : {};
  return { block: tree(ordered ? "ol" : "ul", items, start), lines: end - at };
}

/** An item of one paragraph needs no paragraph. */
function tight(blocks) {
  return blocks.length && blocks[0].tag === "p" ? [...blocks[0].children, ...blocks.slice(1)] : blocks;
}

function cells(line) {
  const bare = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return bare.split("|").map((cell) => cell.trim());
}

function table(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length) return null;
  const divider = cells(lines[at + 1]);
  const head = cells(lines[at]);
  if (divider.length !== head.length || !divider.every((cell) => /^:?-+:?$/.test(cell))) return null;
  let end = at + 2;
  const body = [];
  while (end < lines.length && lines[end].includes("|") && lines[end].trim() !== "") {
    const row = cells(lines[end]);
    body.push(tree("tr", head.map((_, column) => tree("td", parseInline(row[column] ?? "", 0)))));
    end += 1;
  }
  const titles = tree("tr", head.map((cell) => tree("th", parseInline(cell, 0))));
  return { block: tree("table", [tree("thead", [titles]), tree("tbody", body)]), lines: end - at };
}

/** Pairs of marks, the longer ones first. */
const PAIRS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

function parseInline(text, depth) {
  const parts = [];
  let plain = "";
  const flush = () => {
    if (plain) parts.push(plain);
    plain = "";
  };
  // Marks that have no partner in this text are looked for once.
  const missing = new Set();
  let at = 0;
  while (at < text.length) {
    const rest = { text, at, depth, missing };
    const found = escaped(rest) ?? code(rest) ?? lineBreak(rest) ?? link(rest) ?? address(rest) ?? pair(rest);
    if (found) {
      if (typeof found.node === "string") plain += found.node;
      else {
        flush();
        parts.push(found.node);
      }
      at = found.end;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  flush();
  return parts;
}

function escaped({ text, at }) {
  const next = text[at + 1];
  return text[at] === "\\" && next && "\\`*_{}[]()#+-.!|<>~".includes(next) ? { node: next, end: at + 2 } : null;
}

function find(text, mark, from, missing) {
  if (missing.has(mark)) return -1;
  const end = text.indexOf(mark, from);
  if (end < 0) missing.add(mark);
  return end;
}

function code({ text, at, missing }) {
  if (text[at] !== "`") return null;
  let length = 1;
  while (text[at + length] === "`") length += 1;
  const mark = "`".repeat(length);
  const end = find(text, mark, at + length, missing);
  if (end < 0) return { node: mark, end: at + length };
  const inner = text.slice(at + length, end).replace(/\n/g, " ");
  const spaced = inner.length > 2 && inner.startsWith(" ") && inner.endsWith(" ");
  return { node: tree("code", [spaced ? inner.slice(1, -1) : inner]), end: end + length };
}

function lineBreak({ text, at }) {
  return text[at] === "\n" ? { node: tree("br", []), end: at + 1 } : null;
}

function link({ text, at, depth, missing }) {
  const picture = text[at] === "!" && text[at + 1] === "[";
  if ((text[at] !== "[" && !picture) || depth >= MAX_DEPTH) return null;
  const from = at + (picture ? 2 : 1);
  const middle = find(text, "](", from, missing);
  if (middle < 0) return null;
  const end = find(text, ")", middle + 2, missing);
  if (end < 0 || text.slice(from, middle).includes("\n\n")) return null;
  const target = text.slice(middle + 2, end).trim().split(/\s/)[0];
  const label = text.slice(from, middle);
  const inner = picture ? [label || target] : parseInline(label, depth + 1);
  return { node: anchor(target, inner) ?? tree("span", inner), end: end + 1 };
}

/** A link to elsewhere; null if it is none that may be followed. */
function anchor(target, children) {
  if (!/^(https?:\/\/|mailto:)[^\s]/i.test(target)) return null;
  return tree("a", children, { href: target, target: "_blank", rel: "noopener noreferrer nofollow" });
}

function address({ text, at }) {
  if (text[at] !== "h" || (at > 0 && /\w/.test(text[at - 1]))) return null;
  const found = /^https?:\/\/[^\s<>"'`)\]]{1,2000}/.exec(text.slice(at, at + 2010));
  if (!found) return null;
  const target = found[0].replace(/[.,;:!?*_]+$/, "");
  return { node: anchor(target, [target]) ?? target, end: at + target.length };
}

function pair({ text, at, depth, missing }) {
  if (depth >= MAX_DEPTH) return null;
  for (const [mark, tag] of PAIRS) {
    if (!text.startsWith(mark, at)) continue;
    const from = at + mark.length;
    const inWord = mark.includes("_") && at > 0 && /\w/.test(text[at - 1]);
    if (inWord || from >= text.length || /\s/.test(text[from])) continue;
    let end = find(text, mark, from + 1, missing);
    // A single mark is not half of a double one.
    if (mark.length === 1 && end >= 0 && text[end + 1] === mark && text[end + 2] !== mark) end = find(text, mark, end + 2, missing);
    if (end < 0 || /\s/.test(text[end - 1]) || (mark.includes("_") && /\w/.test(text[end + mark.length] ?? ""))) continue;
    return { node: tree(tag, parseInline(text.slice(from, end), depth + 1)), end: end + mark.length };
  }
  return null;
}

/** Nodes of a tree. */
function nodes(parts) {
  return parts.map((part) =>
    typeof part === "string" ? document.createTextNode(part) : make(part.tag, part.attributes, ...nodes(part.children)));
}
