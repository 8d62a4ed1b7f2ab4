// Axes, lines, and a cursor for pointer and keyboard; every chart is drawn for its current width.

const look = (study, method, strategy) => study.looks[strategy][study.methods.indexOf(method)];
const colourOf = (study, method, strategy) => `var(--series-${look(study, method, strategy)[0]})`;

const observer = new ResizeObserver((entries) => {
  for (const entry of entries) entry.target.redraw?.(Math.floor(entry.contentRect.width));
});

// A box that calls draw(width) now and whenever its width changes.
function drawn(draw, attributes = {}) {
  const box = el("div", { class: "chart", ...attributes });
  let last = 0;
  box.redraw = (width, force) => {
    if (width < 40 || (!force && width === last)) return;
    last = width;
    box.replaceChildren(draw(width));
  };
  box.again = () => box.redraw(last || Math.floor(box.clientWidth), true);
  observer.observe(box);
  return box;
}

// ---- scales

function niceTicks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw) || 10 * power;
  const ticks = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) {
    ticks.push(Number(value.toPrecision(12)));
  }
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const m of [1, 2, 5]) {
      const value = Number((m * 10 ** power).toPrecision(3));
      if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value);
    }
  }
  return ticks.length > 7 ? ticks.filter((v) => Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9) : ticks;
}

function scale(domain, range, kind = "linear") {
  const to = kind === "log" ? Math.log : kind === "complement" ? (v) => -Math.log1p(-v) : (v) => v;
  let [a, b] = domain.map(to);
  if (a === b) { a -= 0.5; b += 0.5; }
  return (value) => range[0] + ((to(value) - a) / (b - a)) * (range[1] - range[0]);
}

// ---- the frame

function frame({ width, height, x, y, label, left = 52, bottom = 40, top = 10, right = 12 }) {
  const inner = { left, right: width - right, top, bottom: height - bottom };
  const sx = scale(x.domain, [inner.left, inner.right - (x.room || 0)], x.kind);
  const sy = scale(y.domain, [inner.bottom, inner.top], y.kind);
  const xTicks = x.ticks || (x.kind === "log" ? logTicks(...x.domain) : niceTicks(...x.domain, Math.max(2, width / 90)));
  const xShown = x.whole ? xTicks.filter(Number.isInteger) : xTicks;
  const yTicks = y.ticks || (y.kind === "log" ? logTicks(...y.domain) : niceTicks(...y.domain, Math.max(2, height / 55)));
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const value of yTicks) {
    root.append(svg("line", { class: "grid", x1: inner.left, x2: inner.right, y1: sy(value), y2: sy(value) }),
      svg("text", { class: "tick", x: inner.left - 6, y: sy(value) + 4, "text-anchor": "end" }, y.text ? y.text(value) : short(value)));
  }
  for (const value of xShown) {
    root.append(svg("text", { class: "tick", x: sx(value), y: inner.bottom + 16, "text-anchor": "middle" }, x.text ? x.text(value) : short(value)));
  }
  root.append(svg("line", { class: "axis", x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }),
    svg("text", { class: "label", x: (inner.left + inner.right) / 2, y: height - 4, "text-anchor": "middle" }, x.label),
    svg("text", { class: "label", x: 12, y: (inner.top + inner.bottom) / 2, "text-anchor": "middle",
      transform: `rotate(-90 12 ${(inner.top + inner.bottom) / 2})` }, y.label));
  return { root, sx, sy, inner };
}

// ---- marks: the same shapes as in the figures

function mark(kind, x, y, size, attributes) {
  const polygon = (points) => svg("polygon", { points: points.map(([a, b]) => `${x + a * size},${y + b * size}`).join(" "), ...attributes });
  switch (kind) {
    case "o": return svg("circle", { cx: x, cy: y, r: size, ...attributes });
    case "s": return svg("rect", { x: x - size * 0.9, y: y - size * 0.9, width: size * 1.8, height: size * 1.8, ...attributes });
    case "^": return polygon([[0, -1.2], [1.1, 0.9], [-1.1, 0.9]]);
    case "v": return polygon([[0, 1.2], [1.1, -0.9], [-1.1, -0.9]]);
    case "D": return polygon([[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]]);
    case "P": return polygon([[-0.4, -1.2], [0.4, -1.2], [0.4, -0.4], [1.2, -0.4], [1.2, 0.4], [0.4, 0.4], [0.4, 1.2], [-0.4, 1.2], [-0.4, 0.4], [-1.2, 0.4], [-1.2, -0.4], [-0.4, -0.4]]);
    case "X": return polygon([[-1.2, -0.7], [-0.7, -1.2], [0, -0.5], [0.7, -1.2], [1.2, -0.7], [0.5, 0], [1.2, 0.7], [0.7, 1.2], [0, 0.5], [-0.7, 1.2], [-1.2, 0.7], [-0.5, 0]]);
    default: return polygon(Array.from({ length: 10 }, (_, k) => {
      const r = k % 2 ? 0.55 : 1.4, a = (Math.PI * k) / 5;
      return [r * Math.sin(a), -r * Math.cos(a)];
    }));
  }
}

const path = (points) => points.map(([x, y], k) => `${k ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
const dashOf = (study, method, strategy, width = 2) => page.palette.dashes[look(study, method, strategy)[2]].map((d) => d * width * 0.8).join(" ");
const markerOf = (study, method, strategy) => page.palette.markers[look(study, method, strategy)[1]];

// How a method's marks are filled: hollow for search strategies after the first.
function inked(study, method, strategy) {
  const colour = colourOf(study, method, strategy);
  return look(study, method, strategy)[3] ? { fill: "var(--ground)", stroke: colour, "stroke-width": 1.6 } : { fill: colour };
}

function seriesLine(study, method, strategy, points, attributes = {}) {
  return svg("path", { class: "series", d: path(points), stroke: colourOf(study, method, strategy),
    "stroke-dasharray": dashOf(study, method, strategy) || null, ...attributes });
}

// ---- legend: one toggle button per method and strategy

function legend(study, keys, changed) {
  return el("div", { class: "legend", role: "group", "aria-label": "Methods shown" }, keys.map(({ method, strategy, name }) => {
    const hidden = recall(`hidden-${method}-${strategy}`, false);
    const sample = svg("svg", { width: 34, height: 14, "aria-hidden": "true" },
      seriesLine(study, method, strategy, [[1, 7], [33, 7]]),
      mark(markerOf(study, method, strategy), 17, 7, 3.6, inked(study, method, strategy)));
    return el("button", { type: "button", "aria-pressed": String(!hidden), onclick: (event) => {
      memory.set(`hidden-${method}-${strategy}`, !recall(`hidden-${method}-${strategy}`, false));
      event.currentTarget.setAttribute("aria-pressed", String(!recall(`hidden-${method}-${strategy}`)));
      changed();
    } }, sample, name);
  }));
}

const shown = (cell) => !recall(`hidden-${cell.method}-${cell.strategy}`, false);

// ---- cursor: the point nearest to the pointer, or the next one by arrow key

function cursor(root, points, describe, columns = 1) {
  if (!points.length) return root;
  const ring = svg("circle", { class: "cursor", r: 6, visibility: "hidden" });
  root.append(ring);
  root.setAttribute("tabindex", "0");
  let at = -1;
  const go = (number, event) => {
    at = Math.max(0, Math.min(points.length - 1, number));
    const point = points[at];
    ring.setAttribute("cx", point.x);
    ring.setAttribute("cy", point.y);
    ring.setAttribute("visibility", "visible");
    const box = root.getBoundingClientRect(), zoom = box.width / root.viewBox.baseVal.width;
    const lines = describe(point);
    root.dispatchEvent(new CustomEvent("pointed", { detail: point }));
    if (event) showTip(lines, event.clientX, event.clientY);
    else { showTip(lines, box.left + point.x * zoom, box.top + point.y * zoom); announce(lines.join(", ")); }
  };
  const leave = () => { ring.setAttribute("visibility", "hidden"); hideTip(); root.dispatchEvent(new CustomEvent("pointed", { detail: null })); };
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect(), zoom = box.width / root.viewBox.baseVal.width;
    const x = (event.clientX - box.left) / zoom, y = (event.clientY - box.top) / zoom;
    let best = 0, least = Infinity;
    points.forEach((point, number) => {
      const far = (point.x - x) ** 2 + (point.y - y) ** 2;
      if (far < least) { least = far; best = number; }
    });
    if (least < 3600) go(best, event); else leave();
  });
  root.addEventListener("pointerleave", leave);
  root.addEventListener("blur", leave);
  root.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
    if (event.key === "Escape") { leave(); return; }
    if (event.key in steps) { event.preventDefault(); go(at < 0 ? 0 : at + steps[event.key]); }
    if (event.key === "Home" || event.key === "End") { event.preventDefault(); go(event.key === "Home" ? 0 : points.length - 1); }
  });
  return root;
}

// ---- colour of a value: cividis, which is readable with colour blindness

const CIVIDIS = ["#00204d", "#213a6b", "#4a556b", "#6c6e72", "#8f8a78", "#b4a671", "#dcc560", "#ffea46"];

function heat(share) {
  const at = Math.max(0, Math.min(1, share)) * (CIVIDIS.length - 1), low = Math.min(CIVIDIS.length - 2, Math.floor(at));
  const parts = [1, 3, 5].map((k) => {
    const a = parseInt(CIVIDIS[low].slice(k, k + 2), 16), b = parseInt(CIVIDIS[low + 1].slice(k, k + 2), 16);
    return Math.round(a + (b - a) * (at - low));
  });
  return { fill: `rgb(${parts.join(",")})`, text: share > 0.52 ? "#000000" : "#ffffff" };
}

function extent(values) {
  const numbers = values.filter(isNumber);
  return numbers.length ? [Math.min(...numbers), Math.max(...numbers)] : null;
}

function padded([low, high], share = 0.05) {
  const room = (high - low || Math.abs(high) || 1) * share;
  return [low - room, high + room];
}
