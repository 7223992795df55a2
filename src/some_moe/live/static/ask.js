// Ask the model: each token's path, experts forbidden or forced, text as it is written, two models on one text.
import { ask, askJson, lines, store } from "./net.js";
import { choose, count, dark, el, field, fill, fit, ink, keepFocus, kind, loss, NONE, oklch, percent, rgb, signed, still, worse } from "./dom.js";

const FIRST = "Once upon a time there was a little fox who lived near the river.";

export class AskView {
  constructor(view) {
    Object.assign(this, { view, layer: 0, selected: 1, marked: null, changes: [], checkpoint: "best", other: "", insight: null, by: "expert" });
    this.text = el("textarea", { value: FIRST, "aria-label": "Text for the model", spellcheck: false, maxLength: 8000 });
    this.read = el("button", { class: "first", type: "button", onclick: () => this.trace() }, "Read it");
    this.write = el("button", { type: "button", onclick: () => this.generate() }, "Continue it");
    this.stop = el("button", { type: "button", hidden: true, onclick: () => this.writing?.abort() }, "Stop");
    this.tokens_most = el("input", { type: "number", min: 1, max: 1000, value: 120 });
    this.heat = el("input", { type: "number", min: 0, max: 10, step: 0.1, value: 0.8 });
    this.choices = el("div", { class: "row" });
    this.note = el("p", { class: "note", role: "status" });
    this.sum = el("div"); this.story = el("section", { class: "panel", hidden: true });
    this.tokens = el("div", { class: "tokens", role: "listbox", "aria-label": "Tokens" }); this.second = el("div");
    this.modes = el("div", { class: "row" }); this.path = el("aside", { class: "panel", "aria-live": "polite", "aria-label": "The path of the chosen token" });
    this.list = el("div", { class: "row" });
    this.reading = el("section", { class: "panel", hidden: true }, this.modes, this.sum, this.list, this.tokens, (this.key = el("p", { class: "keyhelp" })), this.second);
    this.node = el("div", { class: "ask" }, el("div", { class: "stack" }, el("section", { class: "panel stack" }, this.text, el("div", { class: "row apart" }, el("div", { class: "row" }, this.read, this.write, this.stop), el("div", { class: "row" }, field("tokens", this.tokens_most), field("temperature", this.heat))), this.choices, this.note), this.story, this.reading), this.path);
    this.tokens.addEventListener("keydown", (e) => this.walk(e));
    this.text.addEventListener("keydown", (e) => { if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) this.trace(); });
    this.showPath();
  }
  get run() { return this.view.run; }
  close() { this.writing?.abort(); }
  leave() { this.writing?.abort(); }
  recolour() { this.show(); }
  update() {
    const run = this.run, others = [...store.runs.values()].filter((one) => one.id !== run.id && one.checkpoints?.length);
    const key = [run.checkpoints, others.map((one) => [one.id, one.checkpoints])].flat(3).join();
    if (key === this.known) return;
    this.known = key;
    const steps = (one) => ["best", "last", ...(one.checkpoints || []).map((n) => `step-${n}`)], name = (which) => which.replace("step-", "step ");
    fill(this.choices, field("checkpoint", choose(steps(run).map((c) => [c, name(c)]), this.checkpoint, (c) => { this.checkpoint = c; this.again(); })),
      field("compare with", choose([["", "nothing"], ...steps(run).map((c) => [`${run.id}/${c}`, `${run.name}, ${name(c)}`]), ...others.flatMap((one) => steps(one).map((c) => [`${one.id}/${c}`, `${one.name}, ${name(c)}`]))], this.other, (c) => { this.other = c; this.by = "beside"; this.again(); })));
  }
  again() { if (this.found) this.trace(); }

  // --- reading ---------------------------------------------------------------------------------------------------
  async trace() {
    const turn = (this.turn = (this.turn || 0) + 1), pairs = (how) => this.changes.filter((c) => c.how === how).flatMap((c) => c.experts.map((e) => [c.layer, e]));
    const had = document.activeElement === this.read; // what is disabled loses the focus
    this.note.className = "note"; this.note.textContent = "The model reads …"; this.read.disabled = true;
    try {
      const text = this.text.value, found = await askJson(`/runs/${this.run.id}/trace`, { text, checkpoint: this.checkpoint, forbid: pairs("forbid"), force: pairs("force") });
      const [id, checkpoint] = this.other.split("/"), other = this.other ? await askJson(`/runs/${id}/trace`, { text, checkpoint }) : null;
      if (turn !== this.turn) return;
      Object.assign(this, { found, beside: other });
      this.layer = Math.min(this.layer, found.trace.layers.length - 1); this.selected = Math.min(this.selected, found.trace.tokens.length - 1);
      if (this.by !== "beside" && (found.altered || other)) this.by = "change";
      this.note.textContent = "";
      if (!this.insight && this.run.analysed) this.insight = await askJson(`/runs/${this.run.id}/insight`).catch(() => null);
    } catch (error) { this.note.className = "note bad"; this.note.textContent = error.message; } finally { this.read.disabled = false; if (had && document.activeElement === document.body) this.read.focus({ preventScroll: true }); }
    this.show();
  }
  sameTokens() { const a = this.found.trace.tokens, b = this.beside?.trace.tokens; return b && a.length === b.length && a.every((token, i) => token.text === b[i].text); }
  // What a token cost is what the one before it gave to it.
  cost(trace, i) { return i > 0 ? trace.tokens[i - 1].next_nats : null; }
  get compares() { return this.by === "change" || this.by === "beside"; }
  get asks_other() { return this.by === "beside" || !this.found.altered; } // or the same model with other experts
  nameBeside() { return `${this.beside.trace.run}, step ${count(this.beside.trace.step)}`; }
  change(i) {
    const now = !this.asks_other ? this.found.altered : this.sameTokens() ? this.beside.trace : null, a = this.cost(this.found.trace, i), b = now && this.cost(now, i);
    return a === null || b === null ? null : b - a;
  }
  show() { if (this.found) keepFocus(this.node, () => this.render()); }
  render() {
    const { found } = this;
    const { trace, altered } = found, same = this.sameTokens();
    this.reading.hidden = false;
    if ((this.by === "change" && !altered) || (this.by === "beside" && !same)) this.by = altered ? "change" : this.compares && same ? "beside" : "expert";
    const ways = [["expert", "expert"], ["loss", "loss"], ...(altered ? [["change", "change of the loss"]] : []), ...(same ? [["beside", "loss in the other model"]] : [])];
    fill(this.modes, field("layer", choose(trace.layers.map((n) => [String(n), String(n)]), String(this.layer), (n) => { this.layer = +n; this.marked = null; this.show(); })), field("colour by", choose(ways, this.by, (by) => { this.by = by; this.show(); })));
    const mean = (name, value, bits) => [el("b", {}, loss(value)), ` nats a token${bits ? `, ${bits.toFixed(3)} bits a byte` : ""} `, el("small", {}, name)];
    const delta = (value) => el("span", { class: worse(value) }, ` (${signed(value)})`);
    fill(this.sum, el("p", { class: "sum" }, mean(`${this.run.name}, step ${count(trace.step)}`, trace.loss, found.bits_per_byte)),
      altered && el("p", { class: "sum" }, mean("with the experts below forbidden or forced", altered.loss), delta(altered.loss - trace.loss)),
      this.beside && el("p", { class: "sum" }, mean(this.nameBeside(), this.beside.trace.loss, this.beside.bits_per_byte), same ? delta(this.beside.trace.loss - trace.loss) : el("span", {}, " (it cuts words otherwise: compare bits a byte)")));
    fill(this.list, this.changes.map((change, i) => el("button", { class: "chip", type: "button", "aria-label": `Take back: ${change.name}`, onclick: () => { this.changes.splice(i, 1); this.trace(); } }, `${change.name} ✕`)));
    this.nodes = trace.tokens.map((token, i) => this.makeToken(token, i));
    fill(this.tokens, this.nodes.flatMap((node, i) => (i && trace.tokens[i].text.endsWith("\n") ? [node, el("br")] : node)));
    this.tokens.classList.toggle("marking", !!this.marked && !this.compares);
    this.key.textContent = { expert: "Under each token its first expert in every layer, from the first layer down.", loss: "Under each token its loss in nats.", change: "Under each token by how much its loss changed, in nats.", beside: "Under each token how much more or less it costs the other model, in nats." }[this.by];
    fill(this.second, this.beside && !same ? [el("h3", {}, `Loss in ${this.nameBeside()}`), el("div", { class: "tokens" }, this.beside.trace.tokens.map((token, i) => el("span", { class: "token", style: { "--tint": this.tint(this.cost(this.beside.trace, i)) }, title: `loss ${loss(this.cost(this.beside.trace, i))}` }, i ? shown(token.text) : "⟨start⟩")))] : null);
    this.showPath();
  }
  tint(nats) { return nats === null ? "transparent" : rgb(oklch(dark() ? 0.62 : 0.72, 0.15, 35), Math.min(0.75, nats / 9)); }
  makeToken(token, i) {
    const chosen = token.experts[this.layer] || [], change = this.change(i), style = {};
    if (this.by === "expert" && chosen.length) style["--tint"] = rgb(kind(chosen[0]), dark() ? 0.34 : 0.22);
    if (this.by === "loss") style["--tint"] = this.tint(this.cost(this.found.trace, i));
    if (this.compares && change !== null) style["--tint"] = rgb(oklch(dark() ? 0.62 : 0.72, 0.15, change > 0 ? 30 : 155), Math.min(0.8, Math.abs(change) * 0.8));
    if (this.compares && change !== null && Math.abs(change) > 0.05) style["--tone"] = rgb(oklch(0.62, 0.17, change > 0 ? 30 : 155));
    const marked = this.marked && this.marked.layer === this.layer && chosen.includes(this.marked.expert), cost = this.cost(this.found.trace, i);
    return el("span", { class: "token" + (marked ? " marked" : ""), role: "option", tabIndex: i === this.selected ? 0 : -1, "aria-selected": String(i === this.selected), style, title: `loss ${loss(cost)}` + (change === null ? "" : `, change ${signed(change)}`), onclick: () => this.select(i) }, i ? token.text.replaceAll("\n", "⏎") : "⟨start⟩", this.makeFoot(token, cost, change));
  }
  makeFoot(token, cost, change) { // under a token: its way through the layers, from top to bottom; or its number
    if (this.by !== "expert") { const value = this.by === "loss" ? cost : change; return el("small", {}, value === null ? NONE : this.by === "loss" ? value.toFixed(2) : Math.abs(value) < 0.005 ? "·" : signed(value, 2)); }
    const many = token.experts.length, high = many > 12 ? 2 : 4, stops = token.experts.map((chosen, n) => `${rgb(kind(chosen[0]))} ${n * high}px ${(n + 1) * high - 1}px, transparent 0 ${(n + 1) * high}px`);
    return many > 0 && el("i", { style: { height: `${many * high}px`, background: `linear-gradient(${stops.join()})` } });
  }
  select(i) { this.selected = i; this.show(); this.nodes[i]?.focus(); }
  walk(e) {
    const many = this.nodes.length, to = { ArrowRight: this.selected + 1, ArrowLeft: this.selected - 1, Home: 0, End: many - 1 }[e.key];
    if (e.key === "Escape") { this.marked = null; this.show(); return; }
    if (to === undefined) return;
    e.preventDefault(); this.select(Math.max(0, Math.min(many - 1, to)));
  }
  showPath() {
    const token = this.found?.trace.tokens[this.selected];
    if (!token) { fill(this.path, el("h2", {}, "Paths"), el("p", { class: "note" }, "Every token asks each layer for experts. Let the model read a text, then choose a token to see who worked on it, and an expert to see its other tokens.")); return; }
    const now = this.found.altered?.tokens[this.selected], cost = this.cost(this.found.trace, this.selected), change = this.change(this.selected);
    const chip = (layer, expert, gate, isNew) => el("button", { class: "chip" + (isNew ? " new" : ""), type: "button", "aria-pressed": String(this.marked?.layer === layer && this.marked?.expert === expert), "aria-label": `Expert ${expert} of layer ${layer}, weight ${gate.toFixed(2)}${isNew ? ", instead" : ""}`, onclick: () => this.mark(layer, expert) }, el("i", { style: { background: rgb(kind(expert)) } }), String(expert), el("small", {}, gate.toFixed(2)));
    fill(this.path, el("h2", {}, this.selected ? shown(token.text).trim() || "space" : "⟨start⟩"),
      el("p", { class: "note" }, cost === null ? "The beginning." : `It cost ${loss(cost)} nats (${percent(Math.exp(-cost))} sure).`, change !== null && el("span", { class: worse(change) }, ` ${this.asks_other ? this.nameBeside() + ":" : "Now"} ${signed(change)}.`), token.guess !== null && ` Next the model expects “${token.guess}” (${percent(token.guess_probability)}).`),
      el("ul", { class: "path" }, this.found.trace.layers.map((layer, n) => el("li", {}, `layer ${layer}`, el("div", { class: "row" }, token.experts[n].map((expert, k) => chip(layer, expert, token.gates[n][k])), now && now.experts[n].map((expert, k) => !token.experts[n].includes(expert) && chip(layer, expert, now.gates[n][k], true)))))),
      this.marked && this.makeActions());
  }
  mark(layer, expert) {
    const same = this.marked?.layer === layer && this.marked?.expert === expert;
    this.marked = same ? null : { layer, expert }; this.layer = this.found.trace.layers.indexOf(layer);
    this.show();
  }
  makeActions() {
    const { layer, expert } = this.marked, n = this.found.trace.layers.indexOf(layer), many = this.found.trace.tokens.filter((token) => token.experts[n].includes(expert)).length;
    const change = (how, experts, name) => () => { this.changes = this.changes.filter((c) => c.layer !== layer || String(c.experts) !== String(experts)); this.changes.push({ how, layer, experts, name }); this.trace(); };
    const guild = this.insight?.communities[layer] && this.insight.communities[layer][expert] >= 0 ? this.insight.communities[layer].flatMap((c, e) => (c === this.insight.communities[layer][expert] ? [e] : [])) : null;
    return el("div", {}, el("p", { class: "note" }, `Expert ${expert} of layer ${layer} runs for ${many} of ${this.found.trace.tokens.length} tokens.` + (guild?.length > 1 ? ` Its guild: the ${guild.length} experts of its community, which work together.` : "")), el("div", { class: "row" },
      el("button", { type: "button", onclick: change("forbid", [expert], `expert ${expert}, layer ${layer}, forbidden`) }, "Forbid it"), el("button", { type: "button", onclick: change("force", [expert], `expert ${expert}, layer ${layer}, forced`) }, "Force it"),
      guild ? [el("button", { type: "button", onclick: change("forbid", guild, `guild of ${guild.length} around expert ${expert}, layer ${layer}, forbidden`) }, `Forbid its guild (${guild.length})`), el("button", { type: "button", onclick: change("force", guild, `guild of ${guild.length} around expert ${expert}, layer ${layer}, forced`) }, "Force its guild")]
        : el("button", { type: "button", onclick: async () => { this.note.textContent = "The model reads some of its own text …"; try { this.insight = await askJson(`/runs/${this.run.id}/look`, {}); this.note.textContent = this.insight.note; } catch (error) { this.note.textContent = error.message; } this.show(); } }, "Find its guild")));
  }

  // --- writing ---------------------------------------------------------------------------------------------------
  async generate() {
    const written = el("span"), libraries = Array.from({ length: this.run.has_experts ? this.run.layers : 0 }, (_, n) => new Library(n, this.run.experts)), told = el("small", { class: "note" });
    this.story.hidden = false;
    fill(this.story, el("h2", {}, "Written"), el("p", { class: "story", "aria-live": "polite", "aria-busy": "true" }, el("span", { class: "given" }, this.text.value), written), told, el("div", { class: "library" }, libraries.map((library) => library.node)));
    const stop = (this.writing = new AbortController()), body = { prompt: this.text.value, checkpoint: this.checkpoint, max_tokens: Math.round(+this.tokens_most.value) || 120, temperature: +this.heat.value };
    this.stop.hidden = false; if (document.activeElement === this.write) this.stop.focus();
    this.write.disabled = this.read.disabled = true; this.note.className = "note"; this.note.textContent = "";
    let many = 0;
    try {
      for await (const line of lines(await ask(`/runs/${this.run.id}/generate`, body, stop.signal))) {
        const piece = JSON.parse(line);
        if (piece.text === undefined) { this.seed = piece.seed; continue; }
        written.append(piece.text);
        for (const token of piece.experts) { many++; for (const [n, experts] of token.entries()) libraries[n]?.light(experts); }
        told.textContent = `${count(many)} tokens, seed ${this.seed}` + (this.changes.length ? "; none of its experts forbidden or forced" : "");
      }
    } catch (error) { if (!stop.signal.aborted) { this.note.className = "note bad"; this.note.textContent = error.message; } }
    this.story.querySelector(".story")?.setAttribute("aria-busy", "false");
    this.write.disabled = this.read.disabled = false; if (document.activeElement === this.stop) this.write.focus();
    this.stop.hidden = true;
  }
}
const shown = (text) => text.replaceAll("\n", "⏎\n");

class Library { // a layer's experts as cells that light up when they work, and remember how often they did
  constructor(layer, experts) {
    this.heat = new Float32Array(experts); this.uses = new Float32Array(experts); this.lit = 0;
    this.columns = Math.min(experts, 64); this.rows = Math.ceil(experts / this.columns);
    this.canvas = el("canvas", { role: "img", style: { height: `${Math.min(140, Math.max(14, this.rows * 10))}px` } });
    this.told = el("span"); this.layer = layer;
    this.node = el("div", {}, el("h3", {}, `layer ${layer}`, this.told), this.canvas);
  }
  light(experts) {
    for (const e of experts) { if (!this.uses[e]++) this.lit++; this.heat[e] = 1; }
    this.told.textContent = `${count(this.lit)} of ${count(this.heat.length)} experts`;
    this.canvas.setAttribute("aria-label", `layer ${this.layer}: ${this.lit} of ${this.heat.length} experts have worked`);
    if (!this.waiting) this.waiting = requestAnimationFrame(() => this.paint());
  }
  paint() {
    this.waiting = 0;
    if (!this.canvas.isConnected) return;
    const ratio = fit(this.canvas), g = this.canvas.getContext("2d"), w = this.canvas.clientWidth / this.columns, h = this.canvas.clientHeight / this.rows, gap = w > 6 && h > 6 ? 1 : 0, most = Math.max(1, ...this.uses);
    g.setTransform(ratio, 0, 0, ratio, 0, 0); g.fillStyle = ink("--sunk"); g.fillRect(0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
    let warm = false;
    for (let e = 0; e < this.heat.length; e++) {
      if (!this.uses[e]) continue;
      const x = (e % this.columns) * w, y = Math.floor(e / this.columns) * h;
      g.fillStyle = rgb(kind(0), 0.15 + 0.45 * Math.sqrt(this.uses[e] / most)); g.fillRect(x, y, w - gap, h - gap);
      if (this.heat[e] > 0.03) { g.fillStyle = rgb(oklch(0.8, 0.17, 75), this.heat[e]); g.fillRect(x, y, w - gap, h - gap); this.heat[e] *= still() ? 0 : 0.93; warm = true; }
    }
    if (warm) this.waiting = requestAnimationFrame(() => this.paint());
  }
}
