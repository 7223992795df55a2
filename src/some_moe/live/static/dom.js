// Small things that every view needs: elements without markup in strings, numbers as words, colours by meaning.

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "style") for (const [field, v] of Object.entries(value)) node.style.setProperty(field, v);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && !name.includes("-") && name !== "list" && name !== "role") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
export const fill = (node, ...children) => { node.replaceChildren(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false)); return node; };

const called = (node) => node.ariaLabel || node.labels?.[0]?.innerText || node.innerText;
export function keepFocus(node, make) { // what is made anew takes over the focus of what it replaces
  const had = node.contains(document.activeElement) && called(document.activeElement);
  make();
  if (had && !node.contains(document.activeElement)) { const all = [...node.querySelectorAll("button, select, input, textarea, [tabindex]")]; (all.find((one) => called(one) === had) ?? all[0])?.focus({ preventScroll: true }); }
}

export const NONE = "–";
const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
export const count = (x) => (isNumber(x) ? Math.round(x).toLocaleString("en") : NONE);
export const loss = (x) => (isNumber(x) ? x.toFixed(x < 100 ? 4 : 1) : NONE);
export const signed = (x, digits = 3) => (isNumber(x) ? (x < 0 ? "−" : "+") + Math.abs(x).toFixed(digits) : NONE);
export const percent = (x) => (!isNumber(x) ? NONE : x > 0 && x < 0.0005 ? "under 0.1 %" : (100 * x).toFixed(x < 0.0995 && x > 0 ? 1 : 0) + " %");
export const worse = (change) => (Math.abs(change) < 0.0005 ? "" : change > 0 ? "up" : "down"); // of a loss
export function short(x) { // a number on an axis or in a legend
  if (!isNumber(x)) return NONE;
  const size = Math.abs(x);
  if (size >= 1e6) return +(x / 1e6).toPrecision(3) + " M";
  if (size >= 1e4) return +(x / 1e3).toPrecision(3) + " k";
  if (size >= 100 || x === 0) return String(Math.round(x));
  return size < 1e-3 ? x.toExponential(1) : String(+x.toPrecision(4));
}
export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 90) return Math.max(1, Math.round(seconds)) + " s";
  if (seconds < 5400) return Math.round(seconds / 60) + " min";
  return seconds < 172800 ? (seconds / 3600).toFixed(1) + " h" : (seconds / 86400).toFixed(1) + " days";
}

export const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;
export const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
export const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Colours of even lightness: OKLCH to sRGB, three bytes each.
export function oklch(l, c, h) {
  const a = c * Math.cos((h * Math.PI) / 180), b = c * Math.sin((h * Math.PI) / 180);
  const [x, y, z] = [l + 0.3963377774 * a + 0.2158037573 * b, l - 0.1055613458 * a - 0.0638541728 * b, l - 0.0894841775 * a - 1.291485548 * b].map((v) => v ** 3);
  return [4.0767416621 * x - 3.3077115913 * y + 0.2309699292 * z, -1.2684380046 * x + 2.6097574011 * y - 0.3413193965 * z, -0.0041960863 * x - 0.7034186147 * y + 1.707614701 * z]
    .map((v) => Math.round(255 * Math.min(1, Math.max(0, v <= 0.0031308 ? 12.92 * v : 1.055 * v ** (1 / 2.4) - 0.055))));
}
const HUES = [262, 45, 155, 350, 95, 205, 315, 25, 125, 235, 290, 70];
export const kind = (i, night = dark()) => (i < 0 ? (night ? [110, 116, 128] : [170, 170, 165]) : oklch(night ? 0.76 : 0.58, 0.14, i < HUES.length ? HUES[i] : (i * 137.5 + 20) % 360));
export const ramp = (t) => oklch(0.5 + 0.4 * t, 0.06 + 0.1 * t, 262 - 215 * t); // from cool to warm, at night
export const depth = (i, n) => oklch(dark() ? 0.74 : 0.55, 0.13, 262 - (n > 1 ? (230 * i) / (n - 1) : 0)); // first to last layer
export const rgb = ([r, g, b], alpha = 1) => `rgb(${r} ${g} ${b} / ${alpha})`;

let serial = 0;
export const fresh = (name) => `${name}-${++serial}`;
export function field(label, control) { // a control with its name beside it
  control.id ||= fresh("field");
  return el("span", { class: "field" }, el("label", { htmlFor: control.id }, label), control);
}
export function choose(options, value, onchange, label) {
  const node = el("select", { onchange: () => onchange(node.value), "aria-label": label }, options.map(([v, text]) => el("option", { value: v }, text)));
  node.value = value;
  return node;
}
export function fit(canvas) { // its pixels, for a screen of any density
  const ratio = Math.min(3, devicePixelRatio || 1), width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  return ratio;
}
