// Elements, numbers and the reader's choices. Text becomes text nodes, so nothing from a study becomes markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Text with `code` between backticks.
const withCode = (text) => text.split("`").map((part, number) => (number % 2 ? el("code", {}, part) : part));

// ---- numbers

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const real = (value) => (value === "inf" ? Infinity : value === "-inf" ? -Infinity : value);
const budget = (epsilon) => (real(epsilon) === Infinity ? "ε = ∞" : `ε = ${short(epsilon)}`);

function short(value, digits = 4) {
  if (typeof value === "boolean" || typeof value === "string") return String(value);
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "–";
  return String(Number(value.toPrecision(digits)));
}

const scored = (study, value) =>
  !isNumber(value) ? "–" : study.objective.digits === null ? short(value, 3) : value.toFixed(study.objective.digits);

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function deviation(values) {
  if (values.length < 2) return null;
  const middle = mean(values);
  return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
}

function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

const moment = (seconds) => new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC";
const distinct = (values) => [...new Set(values)];

// ---- choices, kept when the page is redrawn

const memory = new Map();
const recall = (name, otherwise) => (memory.has(name) ? memory.get(name) : otherwise);

function choice(name, label, options, changed, otherwise) {
  const known = options.map((option) => String(option[0]));
  let value = String(recall(name, otherwise ?? known[0]));
  if (!known.includes(value)) value = known[0];
  memory.set(name, value);
  const box = el("select", { id: `choice-${name}`, onchange: (event) => { memory.set(name, event.target.value); changed(); } },
    options.map(([key, text]) => el("option", { value: key, selected: String(key) === value }, text)));
  return options.length < 2 ? null : el("label", { class: "choice" }, el("span", {}, label), box);
}

function tick(name, label, changed, otherwise = false) {
  const value = recall(name, otherwise);
  memory.set(name, value);
  const box = el("input", { type: "checkbox", id: `tick-${name}`, checked: value,
    onchange: (event) => { memory.set(name, event.target.checked); changed(); } });
  return el("label", { class: "choice tick" }, box, el("span", {}, label));
}

// ---- announcements, tooltips, clipboard

let announcementTimer = 0;
function announce(text) {
  const box = document.getElementById("announcement");
  box.textContent = text;
  box.classList.add("shown");
  clearTimeout(announcementTimer);
  announcementTimer = setTimeout(() => box.classList.remove("shown"), 2500);
}

function showTip(lines, x, y) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(...lines.map((line, number) => el("div", { class: number ? "" : "first" }, line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.max(4, Math.min(x + 14, document.documentElement.clientWidth - width - 8));
  tip.style.left = `${left + window.scrollX}px`;
  tip.style.top = `${(y + height + 20 > window.innerHeight ? y - height - 12 : y + 14) + window.scrollY}px`;
}

const hideTip = () => { document.getElementById("tip").hidden = true; };

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { class: "toast" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  announce(`${what} copied`);
}
