// Branches of a run that was grown or merged: who serves what, and how that moves when branches are favoured.
import { Chart } from "./chart.js";
import { askJson } from "./net.js";
import { count, el, field, fill, kind, loss, percent, rgb, signed, worse } from "./dom.js";

export class BranchView {
  constructor(view) {
    this.view = view;
    this.about = el("p", { class: "lead" });
    this.losses = new Chart("Loss, by favour", { unit: "favour", format: loss }); this.served = new Chart("Share that branches serve, by favour", { unit: "favour", zero: true, format: percent, axis: percent });
    this.curves = el("div", { class: "charts" }, this.losses.node, this.served.node);
    this.text = el("textarea", { "aria-label": "Text to share out", maxLength: 8000, value: "The party agrees to give notice in writing. Once upon a time there was a fox." });
    this.slider = el("input", { type: "range", min: -30, max: 30, step: 0.1, value: 0, oninput: () => { this.say(); this.ask(); } });
    this.value = el("output", { class: "mono" }); this.back = el("button", { type: "button", onclick: () => { this.slider.value = this.own; this.say(); this.ask(); } }, "Back to the run's own");
    this.note = el("p", { class: "note", role: "status" }); this.bar = el("div", { class: "shares", role: "img" }); this.legend = el("ul", { class: "legend" }); this.tokens = el("div", { class: "tokens" }); this.sum = el("p", { class: "sum" });
    const go = el("button", { class: "first", type: "button", onclick: () => this.ask() }, "Share it out");
    this.node = el("div", { class: "stack" }, this.about, el("section", { class: "panel stack" }, el("h2", {}, "Who serves what"), this.text, el("div", { class: "row" }, go, field("favour", this.slider), this.value, this.back), this.note, this.sum, this.bar, this.legend, this.tokens), this.curves);
  }
  get run() { return this.view.run; }
  recolour() { this.show(); }
  async update() {
    if (this.known === this.run.branches.length) return;
    this.known = this.run.branches.length;
    let found;
    try { found = await askJson(`/runs/${this.run.id}/branches`); } catch (error) { this.note.textContent = error.message; return; }
    Object.assign(this, { parts: found.parts, own: found.favour, curve: found.curve });
    this.slider.value = found.favour; this.say();
    this.about.textContent = `${found.merged ? "Merged" : "Grown"} on step ${count(found.base_step)} of ${found.base.split("/").at(-1)}: ` + found.parts.map((part) => `${part.name} (${count(part.experts)} experts a layer)`).join(", ") + ".";
    this.curves.hidden = !found.curve.length;
    this.drawCurves();
  }
  say() { this.value.textContent = signed(+this.slider.value, 1); this.slider.setAttribute("aria-valuetext", `favour ${this.value.textContent}`); this.drawCurves(); }
  drawCurves() {
    if (!this.curve?.length) return;
    const x = this.curve.map((p) => p.favour), line = (name, field_, color) => ({ name, color: kind(color), x, y: this.curve.map((p) => p[field_]), dots: true });
    this.losses.set([line("new text", "new_loss", 1), line("kept text", "kept_loss", 0)]); this.served.set([line("of new text", "new_share", 1), line("of kept text", "kept_share", 0)]);
    for (const chart of [this.losses, this.served]) { chart.cursor = +this.slider.value; chart.draw(); }
  }
  ask() { // one question at a time, and the last one last
    if (this.busy) { this.again = true; return; }
    this.busy = true; this.again = false;
    askJson(`/runs/${this.run.id}/trace`, { text: this.text.value, favour: +this.slider.value }).then((found) => { this.found = found; this.note.textContent = ""; this.show(); }, (error) => { this.note.textContent = error.message; this.again ||= error.status === 429; })
      .finally(() => { this.busy = false; if (this.again) setTimeout(() => this.ask(), 60); });
  }
  part(expert) { let end = 0; return this.parts.findIndex((part) => expert < (end += part.experts)); }
  share(token) { // of each part, by gates; what branches leave is the base's
    const of = this.parts.map(() => 0), layers = token.experts.length;
    token.experts.forEach((experts, n) => experts.forEach((expert, k) => { of[this.part(expert)] += token.gates[n][k] / layers; }));
    of[0] = Math.max(0, 1 - of.slice(1).reduce((sum, one) => sum + one, 0));
    return of;
  }
  show() {
    if (!this.found || !this.parts) return;
    const now = this.found.altered || this.found.trace, each = now.tokens.map((token) => this.share(token));
    const total = now.tokens.length, shares = this.parts.map((_, n) => each.reduce((sum, of) => sum + of[n], 0));
    const words = this.parts.map((part, n) => `${part.name} ${percent(shares[n] / total)}`);
    fill(this.bar, shares.map((many, n) => el("i", { style: { width: `${(100 * many) / total}%`, background: rgb(kind(n)) } }))); this.bar.setAttribute("aria-label", words.join(", "));
    fill(this.legend, words.map((word, n) => el("li", {}, el("i", { style: { background: rgb(kind(n)) } }), word)));
    const change = now.loss - this.found.trace.loss;
    fill(this.sum, el("b", {}, loss(now.loss)), " nats a token", this.found.altered && +this.slider.value !== this.own && el("span", { class: worse(change) }, ` (${signed(change)} beside the run's own favour)`));
    fill(this.tokens, now.tokens.slice(1).map((token, at) => { // as strongly coloured as branches serve it
      const of = each[at + 1], share = 1 - of[0], most = of.indexOf(Math.max(...of.slice(1)), 1);
      return el("span", { class: "token", title: `${percent(share)} by branches`, style: share ? { "--tint": rgb(kind(most), 0.12 + 0.5 * share) } : {} }, token.text.replaceAll("\n", "⏎\n"));
    }));
  }
}
