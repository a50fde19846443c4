// Two charts as SVG.
const NS = "http://www.w3.org/2000/svg";
const W = 480, H = 220, LEFT = 40, RIGHT = 12, TOP = 12, BOTTOM = 26;

function add(parent, name, attributes, text) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
}

function frame(svg, low, high, first, last) {
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  const x = (v) => LEFT + ((W - LEFT - RIGHT) * (v - first)) / Math.max(last - first, 1e-9);
  const y = (v) => H - BOTTOM - ((H - TOP - BOTTOM) * (v - low)) / Math.max(high - low, 1e-9);
  add(svg, "line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: H - BOTTOM, y2: H - BOTTOM });
  add(svg, "line", { class: "axis", x1: LEFT, x2: LEFT, y1: TOP, y2: H - BOTTOM });
  return { x, y };
}

export function drawCurve(svg, { curve, line, alarm, rows }) {
  const values = curve.map(([, v]) => v);
  const high = Math.max(line * 1.3, Math.min(Math.max(...values), line * 6)), low = Math.max(Math.min(0, ...values), -2);
  const { x, y } = frame(svg, low, high, 0, Math.max(rows, 1));
  const clip = (v) => Math.min(Math.max(v, low), high);
  add(svg, "line", { class: "limit", x1: LEFT, x2: W - RIGHT, y1: y(line), y2: y(line) });
  add(svg, "text", { x: W - RIGHT, y: y(line) - 4, "text-anchor": "end" }, "alarm");
  if (alarm) add(svg, "line", { class: "began", x1: x(alarm.began), x2: x(alarm.began), y1: TOP, y2: H - BOTTOM });
  if (alarm) add(svg, "text", { x: x(alarm.began) + 3, y: TOP + 10 }, "began");
  add(svg, "polyline", { class: "curve", points: curve.map(([r, v]) => `${x(r)},${y(clip(v))}`).join(" ") });
  add(svg, "text", { x: LEFT - 4, y: y(0) + 4, "text-anchor": "end" }, "0");
  add(svg, "text", { x: LEFT - 4, y: y(line) + 4, "text-anchor": "end" }, line.toFixed(0));
  add(svg, "text", { x: LEFT, y: H - 8 }, "0");
  add(svg, "text", { x: W - RIGHT, y: H - 8, "text-anchor": "end" }, `row ${rows}`);
}

export function drawReliability(svg, bins) {
  const { x, y } = frame(svg, 0, 1, 0, 1), most = Math.max(1, ...bins.map(([count]) => count));
  add(svg, "line", { class: "began", x1: x(0), y1: y(0), x2: x(1), y2: y(1) });
  bins.forEach(([count, confidence, right]) => {
    if (!count) return;
    add(svg, "circle", { class: "bar", cx: x(confidence / count), cy: y(right / count), r: 3 + 7 * Math.sqrt(count / most) });
  });
  add(svg, "text", { x: W - RIGHT, y: H - 8, "text-anchor": "end" }, "probability");
  add(svg, "text", { x: LEFT + 4, y: TOP + 10 }, "part that is right");
}
