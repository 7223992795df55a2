// The galaxy: every key of every layer as a point on a map that stays, so that what moves is the keys.
import { Chart } from "./chart.js";
import { ask, askJson } from "./net.js";
import { choose, count, el, field, fill, fit, ink, keepFocus, kind, percent, ramp, rgb, still } from "./dom.js";

const VERTEX = `#version 300 es
in vec4 before, after; in vec3 tone; uniform float t, ratio, size, spread; uniform vec4 cell; uniform vec2 screen;
out vec3 colour; out float glow, core;
void main() {
  vec3 key = mix(before.xyz, after.xyz, t);
  vec2 place = (cell.xy + key.xy * cell.z) / screen * 2.0 - 1.0;
  gl_Position = vec4(place.x, -place.y, 0, 1);
  glow = after.w * (1.0 - t) * 1.4;
  float width = size * (0.55 + 1.15 * sqrt(clamp(key.z, 0.0, 9.0)));
  gl_PointSize = ratio * (width * spread + 20.0 * glow);
  core = ratio * width / gl_PointSize; colour = tone;
}`;
const FRAGMENT = `#version 300 es
precision mediump float; in vec3 colour; in float glow, core; out vec4 pixel;
void main() {
  float r = length(gl_PointCoord - 0.5) * 2.0, dim = max(0.0, 1.0 - r);
  float body = 0.88 * smoothstep(core, core * 0.72, r), halo = core < 0.95 ? 0.5 * dim * dim : 0.0, flash = min(glow, 1.0) * dim;
  pixel = vec4(mix(colour, vec3(1.0, 0.93, 0.7), flash) * max(body, halo + flash), body + 0.4 * flash); // light adds up
}`;
// Where each key came from: of every segment two ends, of which the newest moves along with its key.
const TRAIL_VERTEX = `#version 300 es
in vec4 ends; in float fade; in vec3 tone; uniform float t; uniform vec4 cell; uniform vec2 screen; out vec4 colour;
void main() {
  vec2 key = fade < 0.0 ? mix(ends.zw, ends.xy, t) : ends.xy, place = (cell.xy + key * cell.z) / screen * 2.0 - 1.0;
  gl_Position = vec4(place.x, -place.y, 0, 1); colour = vec4(tone * abs(fade), 0.0);
}`;
const TRAIL_FRAGMENT = `#version 300 es
precision mediump float; in vec4 colour; out vec4 pixel; void main() { pixel = colour; }`;
const TRAIL = 12, TRAIL_POINTS = 4096; // snapshots that are seen behind a key, and keys up to which they are

const WORDS = { adj: "adjectives", adv: "adverbs", conj: "conjunctions", det: "determiners", noun: "nouns", num: "numbers", prep: "prepositions", pron: "pronouns", propn: "names", punct: "punctuation", verb: "verbs" };
const spell = (name) => WORDS[name] || name;

class Stars { // the drawing: two frames in two buffers, mixed by time in the vertex shader
  constructor(canvas, antialias) { // points have soft edges of their own: only lines need it
    this.canvas = canvas;
    const gl = (this.gl = canvas.getContext("webgl2", { antialias, premultipliedAlpha: true }));
    if (!gl) { this.flat = canvas.getContext("2d"); return; }
    this.points = this.compile(VERTEX, FRAGMENT, ["t", "ratio", "size", "cell", "screen", "spread"], { before: [4, gl.FLOAT], after: [4, gl.FLOAT], tone: [3, gl.UNSIGNED_BYTE] });
    this.lines = this.compile(TRAIL_VERTEX, TRAIL_FRAGMENT, ["t", "cell", "screen"], { ends: [4, gl.FLOAT], fade: [1, gl.FLOAT], tone: [3, gl.UNSIGNED_BYTE] });
    gl.enable(gl.BLEND); gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  }
  compile(vertex, fragment, uniforms, attributes) {
    const gl = this.gl, program = gl.createProgram(), array = gl.createVertexArray();
    for (const [type, text] of [[gl.VERTEX_SHADER, vertex], [gl.FRAGMENT_SHADER, fragment]]) { const shader = gl.createShader(type); gl.shaderSource(shader, text); gl.compileShader(shader); gl.attachShader(program, shader); }
    gl.linkProgram(program);
    gl.bindVertexArray(array);
    const buffers = Object.fromEntries(Object.entries(attributes).map(([name, [width, type]]) => {
      const buffer = gl.createBuffer(), place = gl.getAttribLocation(program, name);
      gl.bindBuffer(gl.ARRAY_BUFFER, buffer); gl.enableVertexAttribArray(place); gl.vertexAttribPointer(place, width, type, type !== gl.FLOAT, 0, 0);
      return [name, buffer];
    }));
    return { program, array, buffers, at: Object.fromEntries(uniforms.map((name) => [name, gl.getUniformLocation(program, name)])) };
  }
  fill(buffer, data) { this.gl.bindBuffer(this.gl.ARRAY_BUFFER, buffer); this.gl.bufferData(this.gl.ARRAY_BUFFER, data, this.gl.DYNAMIC_DRAW); }
  load(name, data) { this[name] = data; if (this.gl) this.fill(this.points.buffers[name], data); }
  trace(past) { // past: frames, the newest first; the first of them is the one that is shown
    this.segments = Math.max(0, past.length - 1);
    if (!this.gl || !this.segments) return;
    const many = past[0].length / 4, ends = new Float32Array(8 * many * this.segments), fade = new Float32Array(2 * many * this.segments), tone = new Uint8Array(6 * many * this.segments);
    for (let i = 0, at = 0; i < many; i++) for (let k = 0; k < this.segments; k++) for (const [frame, old] of [[past[k], k], [past[k + 1], k + 1]]) {
      ends.set([frame[4 * i], frame[4 * i + 1], past[1][4 * i], past[1][4 * i + 1]], 4 * at);
      fade[at] = (old ? 1 : -1) * 0.75 * (1 - old / (TRAIL + 1)) ** 1.5; tone.set(this.tone.subarray(3 * i, 3 * i + 3), 3 * at); at++;
    }
    for (const [name, data] of Object.entries({ ends, fade, tone })) this.fill(this.lines.buffers[name], data);
  }
  draw({ t, size, cells, experts }) { // cells: [layer, x, y, scale] in pixels of the page
    const ratio = fit(this.canvas), gl = this.gl, w = this.canvas.clientWidth, h = this.canvas.clientHeight;
    if (!this.after || !this.tone) return;
    if (gl) {
      gl.viewport(0, 0, this.canvas.width, this.canvas.height); gl.clearColor(0, 0, 0, 0); gl.clear(gl.COLOR_BUFFER_BIT);
      for (const { program, array, at } of this.segments ? [this.lines, this.points] : [this.points]) {
        gl.useProgram(program); gl.bindVertexArray(array); gl.uniform1f(at.t, t); gl.uniform2f(at.screen, w, h);
        if (at.size) { gl.uniform1f(at.ratio, ratio); gl.uniform1f(at.size, size); gl.uniform1f(at.spread, size > 3 ? 2.4 : 1); }
        const each = at.size ? experts : 2 * this.segments * experts;
        for (const [layer, x, y, scale] of cells) { gl.uniform4f(at.cell, x, y, scale, 0); gl.drawArrays(at.size ? gl.POINTS : gl.LINES, layer * each, each); }
      }
      return;
    }
    const g = this.flat;
    if (!g) return;
    g.setTransform(ratio, 0, 0, ratio, 0, 0); g.clearRect(0, 0, w, h);
    for (const [layer, x, y, scale] of cells) for (let i = layer * experts; i < (layer + 1) * experts; i++) {
      const mix = (k) => this.before[4 * i + k] * (1 - t) + this.after[4 * i + k] * t, r = (size * (0.55 + 1.15 * Math.sqrt(Math.min(9, mix(2))))) / 2 + 8 * this.after[4 * i + 3] * (1 - t);
      g.fillStyle = rgb([this.tone[3 * i], this.tone[3 * i + 1], this.tone[3 * i + 2]], 0.82); g.beginPath(); g.arc(x + mix(0) * scale, y + mix(1) * scale, r, 0, 7); g.fill();
    }
  }
}

export class GalaxyView {
  constructor(view) {
    Object.assign(this, { view, frames: new Map(), place: 0, layer: -1, by: "use", fitAt: null, zoom: 1, pan: [0, 0], picked: null, pinned: false, follow: true, playing: false, t: 1, insight: null });
    this.canvas = el("canvas", { class: "stars", tabIndex: 0, role: "application", "aria-roledescription": "map of keys", "aria-label": "Galaxy of keys" });
    this.over = el("canvas", { class: "over", "aria-hidden": "true" });
    this.stars = new Stars(this.canvas, this.run.layers * this.run.experts <= TRAIL_POINTS);
    this.sky = el("div", { class: "sky" }, this.canvas, this.over);
    this.play = el("button", { type: "button", onclick: () => this.toggle() }, "Play");
    this.slider = el("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Snapshot", oninput: () => { this.follow = this.playing = false; this.go(+this.slider.value); this.controls(); } });
    this.step = el("output");
    this.newest = el("input", { type: "checkbox", checked: true, onchange: () => { this.follow = this.newest.checked; if (this.follow) this.go(this.steps.length - 1); } });
    this.layers = el("span"); this.colours = el("span"); this.legend = el("ul", { class: "legend", "aria-label": "Colours" });
    this.refit = el("button", { type: "button", title: "Lay the map out by the snapshot that is shown", onclick: () => { this.fitAt = this.steps[this.place]; this.frames.clear(); this.go(this.place, true); } }, "Fit the map to now");
    this.look = el("button", { type: "button", onclick: () => this.lookInside() }, "See experts at work");
    this.note = el("p", { class: "note", role: "status" });
    this.card = el("aside", { class: "panel", "aria-live": "polite", "aria-label": "The expert that is pointed at" });
    const help = el("p", { class: "keyhelp" }, "On the map: drag and wheel, or ", ...[["arrows", "move"], ["+ −", "zoom"], ["0", "all"], ["[ ]", "expert"], ["Space", "play"], [", .", "snapshot"]].flatMap(([key, what]) => [el("kbd", {}, key), ` ${what}  `]));
    this.node = el("div", { class: "galaxy" }, el("div", {}, el("div", { class: "row" }, this.layers, this.colours, this.refit, this.look), this.note, this.sky, el("div", { class: "time" }, this.play, this.slider, this.step, field("newest", this.newest)), this.legend, help), this.card);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.sky);
    this.node.view = this; // for the console, and for tests
    this.show(null);
  }
  get run() { return this.view.run; }
  get steps() { return this.run.snapshots || []; }
  leave() { this.playing = false; this.controls(); }
  close() { this.playing = false; this.gone = true; }
  recolour() { this.draw(); }

  update() {
    const run = this.run, key = `${run.layers}:${run.branches.length}:${!!this.insight}:${this.insight?.communities.length}`;
    if (key !== this.made) {
      this.made = key;
      fill(this.layers, field("layer", choose([["-1", "all"], ...Array.from({ length: run.layers }, (_, n) => [String(n), String(n)])], String(this.layer), (n) => { this.layer = +n; this.controls(); this.home(); })));
      const ways = [["use", "use"], ["layer", "layer"], ...(this.insight ? [...(this.insight.communities.length ? [["community", "community"]] : []), ["class", `token class (${this.insight.family})`]] : []), ...(run.branches.length ? [["branch", "branch"]] : [])];
      fill(this.colours, field("colour by", choose(ways, this.by, (by) => { this.by = by; this.paint(); this.draw(); })));
      this.look.hidden = !!this.insight || !run.checkpoints.length;
      this.paint();
    }
    if (this.insight === null && this.asked !== run.analysed) { this.asked = run.analysed; if (run.analysed) askJson(`/runs/${run.id}/insight`).then((found) => this.learn(found), () => {}); }
    const many = this.steps.length, grew = many !== this.many;
    if (many < this.many) this.frames.clear(); // cut back: what comes next is made anew
    this.many = many;
    this.note.hidden = many > 0; if (!many) this.note.textContent = "No key snapshot yet: a run keeps one every train.snapshot_every steps.";
    this.slider.max = Math.max(0, many - 1);
    if (many && (grew || this.place >= many)) { this.fitAt = this.steps.includes(this.fitAt) ? this.fitAt : this.steps[many - 1]; if (this.follow || this.place >= many || !this.stars.after) this.go(this.follow ? many - 1 : Math.min(this.place, many - 1)); }
    this.controls();
  }
  controls() {
    this.play.textContent = this.playing ? "Pause" : "Play"; this.play.setAttribute("aria-pressed", String(this.playing)); this.play.disabled = this.steps.length < 2;
    this.newest.checked = this.follow; this.slider.value = this.place;
    this.step.textContent = this.steps.length ? `step ${count(this.steps[this.place])}` : "";
    this.slider.setAttribute("aria-valuetext", this.step.textContent);
    const wide = this.sky.clientWidth || 800, many = this.layer < 0 ? this.run.layers : 1, columns = Math.min(many, Math.max(2, Math.floor(wide / 225)));
    this.sky.style.height = `${Math.round(Math.min(Math.max(320, innerHeight * 0.68), Math.max(300, (Math.ceil(many / columns) * wide) / columns + 30)))}px`;
    this.canvas.setAttribute("aria-label", `Galaxy of keys: ${count(this.run.layers * this.run.experts)} keys in ${this.run.layers} layers, step ${count(this.steps[this.place])}` + (this.picked ? `; expert ${this.picked.expert} of layer ${this.picked.layer}` : ""));
  }

  // --- time ----------------------------------------------------------------------------------------------------
  async frame(place) {
    const step = this.steps[place], key = `${step}/${this.fitAt}`;
    if (!this.frames.has(key)) {
      if (this.frames.size > 400) this.frames.delete(this.frames.keys().next().value);
      this.frames.set(key, ask(`/runs/${this.run.id}/keys?step=${step}&fit=${this.fitAt}`).then(async (answer) => new Float32Array(await answer.arrayBuffer())));
      this.frames.get(key).catch(() => this.frames.delete(key));
    }
    return this.frames.get(key);
  }
  async go(place, at_once = false) {
    const turn = (this.turn = (this.turn || 0) + 1);
    this.place = Math.max(0, Math.min(place, this.steps.length - 1));
    let next;
    try { next = await this.frame(this.place); } catch (error) { this.note.hidden = false; this.note.textContent = error.message; return false; }
    if (turn !== this.turn || this.gone) return false;
    this.note.hidden = true;
    const same = this.stars.after?.length === next.length;
    this.stars.load("before", same && !at_once ? this.now() : next);
    this.stars.load("after", next);
    if (this.stars.tone?.length !== (next.length / 4) * 3 || this.by === "use") this.paint();
    this.past = []; this.stars.trace([]); this.trace(turn);
    this.began = performance.now(); this.t = same && !at_once && !still() ? 0 : 1;
    this.controls(); this.draw();
    this.fetchCard();
    for (const ahead of [1, 2]) if (this.playing && this.place + ahead < this.steps.length) this.frame(this.place + ahead).catch(() => {});
    return true;
  }
  async trace(turn) { // the way that the keys came, as soon as it is known
    if (this.run.layers * this.run.experts > TRAIL_POINTS || !this.stars.gl) return;
    const past = await Promise.all(Array.from({ length: Math.min(TRAIL, this.place) + 1 }, (_, back) => this.frame(this.place - back))).catch(() => []);
    if (turn === this.turn && !this.gone) { this.past = past; this.stars.trace(past); this.draw(); }
  }
  now() { // where the points are at this moment of their movement
    const { before, after } = this.stars, t = this.ease();
    return t >= 1 ? after : after.map((to, i) => (i % 4 === 3 ? 0 : before[i] * (1 - t) + to * t));
  }
  ease() { return this.t >= 1 ? 1 : this.t * this.t * (3 - 2 * this.t); }
  async toggle() {
    this.playing = !this.playing; this.follow = false; this.controls();
    if (this.playing && this.place >= this.steps.length - 1) this.place = -1;
    while (this.playing && !this.gone) {
      if (this.place >= this.steps.length - 1) { this.playing = false; break; }
      await this.go(this.place + 1);
      await new Promise((done) => setTimeout(done, this.steps.length > 60 ? 260 : 620));
    }
    this.controls();
  }

  // --- drawing ---------------------------------------------------------------------------------------------------
  cells() { // of each layer that is shown: its middle and scale on the page
    const w = this.sky.clientWidth, h = this.sky.clientHeight, shown = this.layer < 0 ? [...Array(this.run.layers).keys()] : [this.layer];
    let best = 1;
    for (let n = 1; n <= shown.length; n++) if (Math.min(w / n, h / Math.ceil(shown.length / n)) > Math.min(w / best, h / Math.ceil(shown.length / best))) best = n;
    const rows = Math.ceil(shown.length / best), cw = w / best, ch = h / rows, scale = (Math.min(cw, ch - 16) / 2) * 0.8 * this.zoom;
    return shown.map((layer, i) => [layer, w / 2 + (((i % best) + 0.5) * cw - w / 2) * this.zoom + this.pan[0], h / 2 + ((Math.floor(i / best) + 0.5) * ch - h / 2) * this.zoom + this.pan[1], scale]);
  }
  draw() { if (!this.waiting) this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.render(); }); }
  render() {
    if (!this.canvas.isConnected || !this.sky.clientWidth || !this.run) return;
    if (this.t < 1) this.t = Math.min(1, (performance.now() - this.began) / 560);
    const cells = this.cells(), experts = this.run.experts, size = Math.max(1.5, Math.min(12, (1.1 * cells[0][3]) / this.zoom / Math.sqrt(experts))) * Math.min(2.4, Math.sqrt(this.zoom));
    this.stars.draw({ t: this.ease(), size, cells, experts });
    const ratio = fit(this.over), g = this.over.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0); g.clearRect(0, 0, this.over.clientWidth, this.over.clientHeight); g.font = `12px ${ink("--sans")}`; g.textAlign = "center";
    for (const [layer, x, y, scale] of cells) {
      g.strokeStyle = "rgb(255 255 255 / 0.1)"; g.lineWidth = 1; g.beginPath(); g.arc(x, y, scale * 1.12, 0, 7); g.stroke();
      g.fillStyle = "rgb(214 220 235 / 0.8)"; g.fillText(`layer ${layer}`, x, y - scale * 1.12 + (scale > 60 ? -5 : 10));
    }
    const from = this.picked && this.where(this.picked.layer, this.picked.expert, cells);
    if (from) {
      const use = this.stars.after[4 * (this.picked.layer * experts + this.picked.expert) + 2];
      g.strokeStyle = "#fff"; g.lineWidth = 1.5; g.beginPath(); g.arc(...from, (size * (0.55 + 1.15 * Math.sqrt(Math.min(9, use)))) / 2 + 4, 0, 7); g.stroke();
      g.strokeStyle = "rgb(255 255 255 / 0.35)"; g.lineWidth = 1;
      for (const [other] of this.neighbours || []) { const to = this.where(this.picked.layer, other, cells); if (from && to) { g.beginPath(); g.moveTo(...from); g.lineTo(...to); g.stroke(); } }
    }
    if (this.t < 1) this.draw();
  }
  where(layer, expert, cells = this.cells()) {
    const cell = cells.find(([n]) => n === layer), i = 4 * (layer * this.run.experts + expert), { before, after } = this.stars, t = this.ease();
    return cell && after ? [cell[1] + (before[i] * (1 - t) + after[i] * t) * cell[3], cell[2] + (before[i + 1] * (1 - t) + after[i + 1] * t) * cell[3]] : null;
  }
  paint() { // a colour for every point, and what the colours mean
    const run = this.run;
    if (!run) return;
    const { layers, experts } = run, tone = new Uint8Array(3 * layers * experts), frame = this.stars.after, legend = new Map(), bounds = [];
    for (const part of run.branches) bounds.push((bounds.at(-1) || 0) + part.experts);
    for (let layer = 0; layer < layers; layer++) for (let e = 0; e < experts; e++) {
      const i = layer * experts + e;
      let colour;
      if (this.by === "use") colour = ramp(Math.min(1, Math.sqrt((frame?.[4 * i + 2] ?? 1) / 3)));
      else {
        const n = this.by === "layer" ? layer : this.by === "branch" ? bounds.findIndex((end) => e < end) : this.by === "class" ? this.insight.kinds[layer]?.[e] ?? -1 : this.insight.communities[layer]?.[e] ?? -1;
        colour = kind(n, true);
        const name = n < 0 ? "not seen at work" : this.by === "layer" ? `layer ${n}` : this.by === "branch" ? run.branches[n].name : this.by === "class" ? spell(this.insight.classes[n]) : `community ${n + 1}`;
        legend.set(name, [n, (legend.get(name)?.[1] || 0) + 1]);
      }
      tone.set(colour, 3 * i);
    }
    this.stars.load("tone", tone); this.stars.trace(this.past || []);
    const items = this.by === "use" ? [["hardly used", ramp(0.1)], ["a fair share", ramp(Math.sqrt(1 / 3))], ["three shares and more", ramp(1)]] : [...legend].sort((a, b) => a[1][0] - b[1][0]).slice(0, 16).map(([name, [n, many]]) => [`${name.trim() || "space"} (${count(many)})`, kind(n, true)]);
    fill(this.legend, items.map(([name, colour]) => el("li", {}, el("i", { style: { background: rgb(colour) } }), name)), el("li", {}, "larger: used more"), this.stars.gl && layers * experts <= TRAIL_POINTS && this.steps.length > 1 && el("li", {}, "tail: where it came from"), run.respawns_possible && el("li", {}, "a flash: respawned"));
  }

  // --- pointing --------------------------------------------------------------------------------------------------
  home() { this.zoom = 1; this.pan = [0, 0]; this.draw(); }
  scale(factor, x = this.sky.clientWidth / 2, y = this.sky.clientHeight / 2) {
    const next = Math.min(60, Math.max(0.6, this.zoom * factor)), f = next / this.zoom, w = this.sky.clientWidth / 2, h = this.sky.clientHeight / 2;
    this.pan = [(this.pan[0] + w - x) * f - w + x, (this.pan[1] + h - y) * f - h + y];
    this.zoom = next; this.draw();
  }
  find(x, y, reach = 14) {
    const { after } = this.stars, experts = this.run.experts;
    let best = null, least = reach * reach;
    if (after) for (const [layer, cx, cy, scale] of this.cells()) for (let e = 0, i = 4 * layer * experts; e < experts; e++, i += 4) { const d = (cx + after[i] * scale - x) ** 2 + (cy + after[i + 1] * scale - y) ** 2; if (d < least) { least = d; best = { layer, expert: e }; } }
    return best;
  }
  listen() {
    const c = this.canvas, fingers = new Map();
    const at = (e) => { const box = c.getBoundingClientRect(); return [e.clientX - box.left, e.clientY - box.top]; };
    let moved = 0;
    c.addEventListener("pointerdown", (e) => { fingers.set(e.pointerId, at(e)); moved = 0; c.setPointerCapture(e.pointerId); });
    c.addEventListener("pointermove", (e) => {
      const [x, y] = at(e), last = fingers.get(e.pointerId);
      if (last) {
        moved += Math.hypot(x - last[0], y - last[1]);
        if (fingers.size === 1) { this.pan = [this.pan[0] + x - last[0], this.pan[1] + y - last[1]]; this.draw(); }
        else { const other = [...fingers].find(([id]) => id !== e.pointerId)[1]; this.scale(Math.hypot(x - other[0], y - other[1]) / Math.max(1, Math.hypot(last[0] - other[0], last[1] - other[1])), (x + other[0]) / 2, (y + other[1]) / 2); }
        fingers.set(e.pointerId, [x, y]);
      } else if (!this.pinned) this.pick(this.find(x, y));
    });
    const end = (e) => { fingers.delete(e.pointerId); if (e.type === "pointerup" && moved < 6) { const found = this.find(...at(e), e.pointerType === "touch" ? 26 : 14); this.pinned = !!found; this.pick(found); } };
    c.addEventListener("pointerup", end); c.addEventListener("pointercancel", end);
    c.addEventListener("wheel", (e) => { e.preventDefault(); this.scale(Math.exp(-Math.max(-120, Math.min(120, e.deltaY)) / 400), ...at(e)); }, { passive: false });
    c.addEventListener("dblclick", () => this.home());
    c.addEventListener("keydown", (e) => {
      const pan = { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] }[e.key], turn = { "[": -1, "]": 1 }[e.key], snap = { ",": -1, ".": 1 }[e.key];
      if (pan) { this.pan = [this.pan[0] + pan[0], this.pan[1] + pan[1]]; this.draw(); }
      else if (e.key === "+" || e.key === "=") this.scale(1.25);
      else if (e.key === "-") this.scale(0.8);
      else if (e.key === "0") this.home();
      else if (e.key === " ") this.toggle();
      else if (snap) { this.follow = this.playing = false; this.go(this.place + snap); }
      else if (e.key === "Escape") { this.pinned = false; this.pick(null); }
      else if (turn) {
        const { experts, layers } = this.run, first = this.layer < 0 ? 0 : this.layer * experts, many = this.layer < 0 ? layers * experts : experts;
        const now = this.picked ? this.picked.layer * experts + this.picked.expert - first : turn > 0 ? -1 : 0, next = first + ((now + turn + many) % many);
        this.pinned = true; this.pick({ layer: Math.floor(next / experts), expert: next % experts });
      } else return;
      e.preventDefault();
    });
  }
  pick(found) {
    const same = found?.layer === this.picked?.layer && found?.expert === this.picked?.expert;
    if (same && (found === null || this.shown)) { this.controls(); return; }
    this.picked = found; this.neighbours = null; this.controls(); this.draw();
    clearTimeout(this.timer);
    if (found) this.timer = setTimeout(() => this.fetchCard(), 90); else this.show(null);
  }
  async fetchCard() {
    const one = this.picked;
    if (!one) return;
    let found;
    try { found = await askJson(`/runs/${this.run.id}/expert?layer=${one.layer}&expert=${one.expert}&step=${this.steps[this.place]}`); } catch (error) { found = { ...one, error: error.message }; }
    if (this.picked === one) { this.neighbours = found.neighbours; this.show(found); this.draw(); }
  }
  show(found) { this.shown = found; keepFocus(this.card, () => this.showCard(found)); }
  showCard(found) {
    if (!found) { fill(this.card, el("h2", {}, "Point at a key"), el("p", { class: "note" }, "Each point is an expert, placed where its key is. Keys that lie together are chosen by like tokens.")); return; }
    const { layer, expert } = found, tags = [], use = this.stars.after?.[4 * (layer * this.run.experts + expert) + 2]; // of the snapshot that is shown
    if (this.insight) { const n = this.insight.kinds[layer]?.[expert], c = this.insight.communities[layer]?.[expert]; if (n >= 0) tags.push(`mostly ${spell(this.insight.classes[n])}`); if (c >= 0) tags.push(`community ${c + 1}`); }
    const chart = found.load?.length > 1 ? (this.load ||= new Chart("Load over time", { zero: true, legend: false })) : null;
    fill(this.card, el("div", { class: "row apart" }, el("h2", {}, `Expert ${expert}, layer ${layer}`), this.pinned && el("button", { class: "plain", type: "button", onclick: () => { this.pinned = false; this.pick(null); } }, "let go")),
      found.error && el("p", { class: "note bad" }, found.error),
      el("p", { class: "note" }, (use === undefined ? "Its load is not known" : `${use.toFixed(2)} times a fair share of the load at step ${count(this.steps[this.place])}`) + (tags.length ? `; ${tags.join(", ")}` : "") + (found.served !== undefined ? `; served ${percent(found.served / Math.max(1, found.of))} of the tokens that were read` : "") + "."),
      found.words?.length ? [el("h3", {}, "Its words"), el("ul", { class: "words" }, found.words.map((w) => el("li", {}, w.text || "␣", el("small", {}, count(w.count))))), found.contexts.map((q) => el("p", { class: "quote" }, "… ", q.before, el("mark", {}, q.word), q.after, " …"))] : found.words && el("p", { class: "note" }, "No token that was read chose it."),
      found.neighbours && [el("h3", {}, "Nearest keys"), el("div", { class: "row" }, found.neighbours.map(([other, near]) => el("button", { class: "chip", type: "button", onclick: () => { this.pinned = true; this.pick({ layer, expert: other }); } }, String(other), el("small", {}, near.toFixed(2)))))],
      chart && el("div", { class: "small" }, chart.node));
    if (chart) { chart.node.className = ""; chart.cursor = this.steps[this.place]; chart.set([{ name: "load", color: kind(0), x: found.load.map((p) => p[0]), y: found.load.map((p) => p[1]) }]); }
  }
  async lookInside() {
    const had = document.activeElement === this.look;
    this.look.disabled = true; this.note.hidden = false; this.note.textContent = "The model reads some of its own text …";
    try { this.learn(await askJson(`/runs/${this.run.id}/look`, {})); this.note.hidden = true; } catch (error) { this.note.textContent = error.message; }
    this.look.disabled = false;
    if (had) (this.look.hidden ? this.colours.querySelector("select") : this.look).focus({ preventScroll: true });
  }
  learn(found) {
    if (!found) return;
    this.insight = found; this.by = found.communities.length ? "community" : "class";
    this.update(); if (this.picked) this.fetchCard();
    this.draw();
  }
}
