// Lines over steps on a canvas: pointing, keys, dragging to zoom, names for those who do not see it.
import { dark, el, fill, fit, fresh, ink, rgb, short } from "./dom.js";

const LEFT = 46, RIGHT = 12, TOP = 10, BOTTOM = 24;

export class Chart {
  // series: [{ name, color: [r, g, b], x, y, faint, dots, smooth, dash }]; lines: [{ y, name }] across all of it
  constructor(title, { log = false, zero = false, wide = false, legend = true, format = short, axis = short, unit = "step", empty = "nothing yet" } = {}) {
    Object.assign(this, { title, log, zero, format, axis, unit, empty, series: [], lines: [], hidden: new Set(), range: null, cursor: null });
    this.canvas = el("canvas", { tabIndex: 0, role: "img", "aria-label": title, "aria-describedby": (this.hint = fresh("hint")) });
    this.at = el("span", { class: "at" });
    this.told = el("span", { class: "hush", "aria-live": "polite" });
    this.legend = el("ul", { class: "keys", hidden: !legend });
    this.logs = el("button", { class: "plain", type: "button", "aria-pressed": String(log), onclick: () => { this.log = !this.log; this.logs.setAttribute("aria-pressed", String(this.log)); this.draw(); } }, "log");
    const help = el("span", { class: "hush", id: this.hint }, "Arrow keys read values along the line, plus and minus zoom, Escape shows all.");
    this.node = el("div", { class: wide ? "panel wide" : "panel" }, el("figure", { class: "chart" }, el("figcaption", {}, el("h2", {}, title), this.at, wide && this.logs), this.canvas, this.legend, this.told, help));
    this.listen();
    this.watcher = new ResizeObserver(() => this.draw());
    this.watcher.observe(this.canvas);
  }
  set(series, lines = []) { this.series = series.filter((s) => s.x.length); this.lines = lines; this.draw(); }
  draw() { if (!this.waiting) this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.paint(); }); }
  shown() { return this.series.filter((s) => !this.hidden.has(s.name)); }

  listen() {
    const c = this.canvas, toX = (e) => this.x0 + ((e.clientX - c.getBoundingClientRect().left - LEFT) / Math.max(1, c.clientWidth - LEFT - RIGHT)) * (this.x1 - this.x0);
    let from = null;
    c.addEventListener("pointermove", (e) => { this.cursor = toX(e); this.drag = from === null ? null : [from, this.cursor]; this.draw(); });
    c.addEventListener("pointerleave", () => { this.cursor = null; this.draw(); });
    c.addEventListener("pointerdown", (e) => { if (e.pointerType === "mouse") { from = toX(e); c.setPointerCapture(e.pointerId); } this.cursor = toX(e); this.draw(); });
    c.addEventListener("pointerup", () => {
      if (from !== null && this.drag && Math.abs(this.drag[1] - this.drag[0]) > (this.x1 - this.x0) / 50) this.range = this.drag.map((x) => x).sort((a, b) => a - b);
      from = this.drag = null; this.draw();
    });
    c.addEventListener("dblclick", () => { this.range = null; this.draw(); });
    c.addEventListener("blur", () => { this.cursor = null; this.draw(); });
    c.addEventListener("keydown", (e) => {
      const span = this.x1 - this.x0, here = this.cursor ?? this.x1, main = this.shown()[0];
      if (!main) return;
      const place = nearest(main.x, here), step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[e.key];
      if (step) this.cursor = main.x[Math.min(main.x.length - 1, Math.max(0, place + step))];
      else if (e.key === "Home") this.cursor = main.x[0];
      else if (e.key === "End") this.cursor = main.x[main.x.length - 1];
      else if (e.key === "+" || e.key === "=") this.range = [here - span / 4, here + span / 4];
      else if (e.key === "-") this.range = [here - span, here + span];
      else if (e.key === "Escape") this.range = null;
      else return;
      e.preventDefault(); this.draw();
      this.told.textContent = `${this.unit} ${short(this.cursor ?? here)}: ` + this.read(this.cursor ?? here).map(([s, y]) => `${s.name} ${this.format(y)}`).join(", ");
    });
  }
  read(x) { return this.shown().map((s) => { const i = nearest(s.x, x); return [s, s.y[i], s.x[i]]; }); }

  paint() {
    const c = this.canvas;
    if (!c.isConnected || !c.clientWidth) return;
    const ratio = fit(c), g = c.getContext("2d"), w = c.clientWidth, h = c.clientHeight, all = this.shown();
    g.setTransform(ratio, 0, 0, ratio, 0, 0); g.clearRect(0, 0, w, h);
    if (!this.series.length) { // axes of nothing would say something
      g.font = `13px ${ink("--sans")}`; g.fillStyle = ink("--faint"); g.textAlign = "center"; g.fillText(this.empty, w / 2, h / 2);
      return this.name(null);
    }
    const reach = [Infinity, -Infinity];
    for (const s of all) { reach[0] = Math.min(reach[0], s.x[0]); reach[1] = Math.max(reach[1], s.x[s.x.length - 1]); }
    if (!(reach[1] >= reach[0])) reach.splice(0, 2, 0, 1);
    else if (this.unit === "step") reach[0] = Math.min(0, reach[0]); // so that charts side by side agree
    if (reach[0] === reach[1]) reach[1] += 1;
    [this.x0, this.x1] = this.range ? [Math.max(reach[0], this.range[0]), Math.min(reach[1], this.range[1])] : reach;
    if (!(this.x1 > this.x0)) { this.range = null; [this.x0, this.x1] = reach; }
    let low = Infinity, high = -Infinity;
    const take = (y) => { if (Number.isFinite(y) && (!this.log || y > 0)) { if (y < low) low = y; if (y > high) high = y; } };
    for (const s of all) for (let i = 0; i < s.x.length; i++) if (s.x[i] >= this.x0 && s.x[i] <= this.x1) take(s.y[i]);
    for (const l of this.lines) take(l.y);
    if (this.zero) take(0);
    if (!(high >= low)) { low = this.log ? 0.1 : 0; high = 1; }
    if (high === low && this.zero && high === 0) high = 1;
    if (high === low) { low -= Math.abs(low) * 0.05 || 0.5; high += Math.abs(high) * 0.05 || 0.5; }
    const map = this.log ? Math.log10 : (y) => y;
    let [y0, y1] = [map(low > 0 || !this.log ? low : high / 1e3), map(high)];
    const pad = (y1 - y0) * 0.06; if (!(this.zero && low === 0)) y0 -= pad; y1 += pad;
    const X = (x) => LEFT + ((x - this.x0) / (this.x1 - this.x0)) * (w - LEFT - RIGHT), Y = (y) => TOP + (1 - (map(y) - y0) / (y1 - y0)) * (h - TOP - BOTTOM);
    g.font = `11px ${ink("--sans")}`; g.lineWidth = 1;
    g.textBaseline = "middle"; g.textAlign = "right";
    for (const y of this.log ? decades(10 ** y0, 10 ** y1) : ticks(y0, y1, h / 38)) {
      g.strokeStyle = ink("--rule"); g.beginPath(); g.moveTo(LEFT, Math.round(Y(y)) + 0.5); g.lineTo(w - RIGHT, Math.round(Y(y)) + 0.5); g.stroke();
      g.fillStyle = ink("--faint"); g.fillText(this.axis(y), LEFT - 7, Y(y));
    }
    g.textBaseline = "alphabetic"; g.fillText(this.unit, LEFT - 7, h - 7); g.textAlign = "center";
    for (const x of ticks(this.x0, this.x1, w / 110)) g.fillText(short(x), Math.max(LEFT - 3 + g.measureText(short(x)).width / 2, Math.min(w - 16, X(x))), h - 7);
    g.save(); g.beginPath(); g.rect(LEFT - 4, TOP - 4, w - LEFT - RIGHT + 8, h - TOP - BOTTOM + 8); g.clip();
    let free = Infinity; // names of lines that lie together stand one above the other
    for (const l of [...this.lines].sort((a, b) => a.y - b.y)) {
      g.strokeStyle = g.fillStyle = ink("--warm"); g.setLineDash([5, 4]); g.beginPath(); g.moveTo(LEFT, Y(l.y)); g.lineTo(w, Y(l.y)); g.stroke(); g.setLineDash([]);
      g.textAlign = "right"; g.fillText(`${l.name} ${this.format(l.y)}`, w - RIGHT - 4, (free = Math.min(free - 14, Y(l.y) - 5)));
    }
    for (const s of all) {
      const y = s.smooth ? soften(s.y) : s.y;
      if (s.smooth && s.y.length > 40) this.stroke(g, s.x, s.y, X, Y, rgb(s.color, 0.22), 1, null);
      this.stroke(g, s.x, s.smooth && s.y.length > 40 ? y : s.y, X, Y, rgb(s.color, s.faint ? 0.45 : 1), s.faint ? 1 : 1.8, s.dash);
      if (s.dots || s.x.length < 3) for (let i = 0; i < s.x.length && s.x.length < 200; i++) if (Number.isFinite(s.y[i])) { g.fillStyle = rgb(s.color); g.beginPath(); g.arc(X(s.x[i]), Y(s.y[i]), 2.6, 0, 7); g.fill(); }
    }
    if (this.drag) { g.fillStyle = rgb([80, 110, 200], 0.16); g.fillRect(X(this.drag[0]), TOP, X(this.drag[1]) - X(this.drag[0]), h - TOP - BOTTOM); }
    const seen = this.cursor === null ? null : Math.min(this.x1, Math.max(this.x0, this.cursor));
    if (seen !== null) {
      g.strokeStyle = ink("--line"); g.beginPath(); g.moveTo(X(seen), TOP); g.lineTo(X(seen), h - BOTTOM); g.stroke();
      for (const [s, y, x] of this.read(seen)) if (Number.isFinite(y)) { g.fillStyle = dark() ? "#fff" : "#000"; g.beginPath(); g.arc(X(x), Y(y), 3.4, 0, 7); g.fill(); g.fillStyle = rgb(s.color); g.beginPath(); g.arc(X(x), Y(y), 2.4, 0, 7); g.fill(); }
    }
    g.restore();
    this.name(seen);
  }
  stroke(g, xs, ys, X, Y, style, width, dash) {
    g.strokeStyle = style; g.lineWidth = width; g.lineJoin = "round"; g.setLineDash(dash || []); g.beginPath();
    let last = null, low = 0, high = 0, open = false;
    const from = Math.max(0, nearest(xs, this.x0) - 1), to = Math.min(xs.length, nearest(xs, this.x1) + 2);
    for (let i = from; i < to; i++) { // of the many points of one column of pixels, the lowest and the highest
      const y = ys[i];
      if (!Number.isFinite(y) || (this.log && y <= 0)) { open = false; last = null; continue; }
      const px = X(xs[i]), py = Y(y), column = Math.round(px * 2);
      if (column === last) { if (py < low) { g.lineTo(px, py); low = py; } else if (py > high) { g.lineTo(px, py); high = py; } continue; }
      if (open) g.lineTo(px, py); else g.moveTo(px, py);
      open = true; last = column; low = high = py;
    }
    g.stroke(); g.setLineDash([]);
  }
  name(seen) {
    const at = seen ?? this.x1, values = new Map(this.read(at).map(([s, y]) => [s.name, y]));
    this.at.textContent = this.series.length ? (seen === null ? (this.range ? "zoomed; double click shows all" : "") : `${this.unit} ${short(Math.round(at))}`) : "";
    this.canvas.setAttribute("aria-label", `${this.title}: ` + ([...values].map(([n, y]) => `${n} ${this.format(y)}`).join(", ") || this.empty) + (this.series.length ? ` at ${this.unit} ${short(Math.round(at))}` : "") + this.lines.map((l) => `; ${l.name} ${this.format(l.y)}`).join(""));
    const names = this.series.map((s) => s.name).join("\n");
    if (names !== this.names) {
      this.names = names;
      fill(this.legend, this.series.map((s) => {
        const value = el("b"), key = el("button", { type: "button", "aria-pressed": "true", onclick: () => { this.hidden.has(s.name) ? this.hidden.delete(s.name) : this.hidden.add(s.name); key.setAttribute("aria-pressed", String(!this.hidden.has(s.name))); this.draw(); } }, el("i", { style: { background: rgb(s.color) } }), s.name, value);
        key.setAttribute("aria-pressed", String(!this.hidden.has(s.name)));
        key.value_of = value;
        return el("li", {}, key);
      }));
    }
    for (const [i, item] of [...this.legend.children].entries()) item.firstChild.value_of.textContent = values.has(this.series[i].name) ? this.format(values.get(this.series[i].name)) : "";
  }
}

export function nearest(xs, x) { // place of the value nearest to x, in order
  let a = 0, b = xs.length - 1;
  while (a < b) { const m = (a + b) >> 1; if (xs[m] < x) a = m + 1; else b = m; }
  return a > 0 && x - xs[a - 1] < xs[a] - x ? a - 1 : Math.max(0, a);
}
export function soften(ys) { // a running mean that forgets
  const keep = 1 - 1 / Math.min(30, Math.max(2, ys.length / 80)), out = new Array(ys.length);
  let mean = 0, weight = 0;
  for (let i = 0; i < ys.length; i++) { if (Number.isFinite(ys[i])) { mean = mean * keep + ys[i] * (1 - keep); weight = weight * keep + 1 - keep; } out[i] = weight ? mean / weight : NaN; }
  return out;
}
function ticks(a, b, about) {
  const rough = (b - a) / Math.max(2, about), size = 10 ** Math.floor(Math.log10(rough)), step = size * [1, 2, 5, 10].find((n) => n * size >= rough), found = [];
  for (let t = Math.ceil(a / step) * step; t <= b + step * 1e-9; t += step) found.push(+t.toPrecision(12));
  return found;
}
function decades(a, b) {
  const found = [];
  for (let e = Math.floor(Math.log10(a)); e <= Math.log10(b); e++) for (const m of b / a > 50 ? [1] : [1, 2, 5]) if (m * 10 ** e >= a && m * 10 ** e <= b) found.push(m * 10 ** e);
  return found.length > 1 ? found : ticks(a, b, 4);
}

export function spark(canvas, points, color) { // a line of [x, y] without axes
  const ratio = fit(canvas), g = canvas.getContext("2d"), w = canvas.clientWidth, h = canvas.clientHeight, ys = points.map((p) => p[1]).filter(Number.isFinite);
  g.setTransform(ratio, 0, 0, ratio, 0, 0); g.clearRect(0, 0, w, h);
  if (ys.length < 2) return;
  const low = Math.min(...ys), high = Math.max(...ys), x0 = points[0][0], x1 = points[points.length - 1][0];
  g.strokeStyle = rgb(color); g.lineWidth = 1.5; g.lineJoin = "round"; g.beginPath();
  for (const [x, y] of points) if (Number.isFinite(y)) g.lineTo(2 + ((x - x0) / (x1 - x0 || 1)) * (w - 4), 3 + (1 - (y - low) / (high - low || 1)) * (h - 6));
  g.stroke();
}
