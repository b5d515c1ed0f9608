// Plots as SVG. Each has a text that says the same.

const SVG = "http://www.w3.org/2000/svg";
const CHART = { width: 420, height: 150, left: 44, right: 8, top: 8, bottom: 20 };

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** The next round number, so that axes are easy to read. */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

/** A plot of series of one length; each is {values, kind: "bar" | "line", second}. */
function chart(title, series, starts, show) {
  const { width, height, left, right, top, bottom } = CHART;
  const count = starts.length;
  const finite = series.flatMap((one) => one.values).filter(Number.isFinite);
  const most = roundUp(Math.max(0, ...finite));
  const step = (width - left - right) / Math.max(count, 1);
  const x = (index) => left + index * step;
  const y = (value) => top + (height - top - bottom) * (1 - value / most);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary(title, series, show) });
  for (const part of [0, 0.5, 1]) {
    picture.append(
      svg("line", { class: "axis", x1: left, x2: width - right, y1: y(most * part), y2: y(most * part) }),
      svg("text", { x: left - 4, y: y(most * part) + 4, "text-anchor": "end" }, show(most * part)));
  }
  for (const [index, anchor] of [[0, "start"], [count - 1, "end"]]) {
    if (count > 1) {
      const at = index ? width - right : left;
      picture.append(svg("text", { x: at, y: height - 5, "text-anchor": anchor }, clock(starts[index])));
    }
  }
  for (const one of series) {
    picture.append(...(one.kind === "bar" ? bars(one, x, y, step) : line(one, x, y, step)));
  }
  const hover = starts.map((start, index) => {
    const told = series.map((one) => `${one.name} ${Number.isFinite(one.values[index]) ? show(one.values[index]) : "–"}`);
    const area = svg("rect", { x: x(index), y: top, width: step, height: height - top - bottom, "fill-opacity": 0 });
    area.append(svg("title", {}, `${clock(start)}: ${told.join(", ")}`));
    return area;
  });
  picture.append(...hover);
  const legend = series.length > 1 ? ` (${series.map((one) => one.name).join(", ")})` : "";
  return make("figure", {}, make("figcaption", {}, title + legend), picture);
}

function bars(one, x, y, step) {
  return one.values.flatMap((value, index) => {
    if (!(value > 0)) return [];
    const shape = { class: one.second ? "bar second" : "bar", x: x(index) + step * 0.1, y: y(value), width: step * 0.8, height: y(0) - y(value) };
    return [svg("rect", shape)];
  });
}

/** A line with a gap where nothing is known. */
function line(one, x, y, step) {
  const parts = [[]];
  one.values.forEach((value, index) => {
    if (Number.isFinite(value)) parts[parts.length - 1].push([x(index) + step / 2, y(value)]);
    else if (parts[parts.length - 1].length) parts.push([]);
  });
  const style = one.second ? " second" : "";
  return parts.filter((part) => part.length).flatMap((part) => [
    svg("polyline", { class: `line${style}`, points: part.map((point) => point.join(",")).join(" ") }),
    ...part.map(([cx, cy]) => svg("circle", { class: `dot${style}`, cx, cy, r: part.length > 1 ? 1.5 : 3 })),
  ]);
}

function summary(title, series, show) {
  const told = series.map((one) => {
    const known = one.values.filter(Number.isFinite);
    return known.length ? `${one.name} up to ${show(Math.max(...known))}, last ${show(known[known.length - 1])}` : `${one.name}: nothing`;
  });
  return `${title}: ${told.join("; ")}`;
}

function clock(us) {
  return new Date(us / 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
}
