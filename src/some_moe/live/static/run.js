// One run: its curves as they grow, what it writes, its settings; and the doors to the galaxy, the model, the branches.
import { Chart } from "./chart.js";
import { askJson, place, store } from "./net.js";
import { AskView } from "./ask.js";
import { BranchView } from "./branches.js";
import { GalaxyView } from "./galaxy.js";
import { choose, count, depth, duration, el, field, fill, kind, loss, NONE, short } from "./dom.js";

const TABS = { curves: "Curves", galaxy: "Galaxy", ask: "Ask the model", samples: "Samples", branches: "Branches", settings: "Settings" };

const AT_EVALUATION = "comes with the first evaluation";

export class RunView {
  constructor(id, log, tab) {
    Object.assign(this, { id, log, parts: {} });
    this.title = el("h1"); this.badge = el("span", { class: "badge" }); this.note = el("p", { class: "note", role: "status" });
    this.numbers = el("dl", { class: "figures" }); this.bar = el("progress", { max: 1 });
    this.tabs = el("nav", { class: "tabs", "aria-label": "Parts of this run" });
    this.body = el("div");
    this.node = el("div", {}, el("div", { class: "row" }, this.title, this.badge), this.note, this.bar, this.numbers, this.tabs, this.body);
    this.tab = tab;
  }
  get run() { return store.runs.get(this.id); }
  close() { for (const part of Object.values(this.parts)) part.close?.(); }
  recolour() { for (const part of Object.values(this.parts)) part.recolour?.(); }
  available() {
    const run = this.run || {};
    return Object.keys(TABS).filter((tab) => ({ curves: run.state !== "merged", samples: run.state !== "merged", galaxy: run.has_keys, ask: run.checkpoints?.length, branches: run.branches?.length })[tab] ?? !["galaxy", "ask", "branches"].includes(tab));
  }
  show(tab) {
    const next = TABS[tab] ? tab : "curves";
    if (this.shown && this.tab !== next) this.parts[this.tab]?.leave?.();
    this.tab = next; this.shown = "";
    this.update();
  }
  part(tab) {
    const make = { curves: Curves, galaxy: GalaxyView, ask: AskView, samples: Samples, branches: BranchView, settings: Settings }[tab];
    return (this.parts[tab] ||= new make(this));
  }
  update() {
    const run = this.run;
    if (!run) { fill(this.body, el("p", { class: "empty" }, "Looking …")); return; }
    place(`${run.name}: ${TABS[this.tab]}`, el("a", { href: "#/" }, "Runs"), ` / ${run.name}`);
    this.title.textContent = run.name; this.badge.textContent = run.state; this.badge.className = `badge ${run.state}`;
    this.note.textContent = [run.folder, run.experiment && `repeats ${run.experiment}`, run.note].filter(Boolean).join(" · ");
    this.bar.hidden = !run.steps; this.bar.value = run.steps ? Math.min(1, (run.step || 0) / run.steps) : 0;
    this.bar.setAttribute("aria-label", `step ${count(run.step)} of ${count(run.steps)}`);
    const best = Math.min(...this.log.evaluations.map((e) => e.val_loss).filter(Number.isFinite), run.best_val_loss ?? Infinity);
    const numbers = [
      ["Step", count(run.step), run.steps ? `of ${count(run.steps)}` : ""], ["Training loss", loss(run.train_loss), "nats a token"],
      ["Validation loss", loss(run.val_loss), Number.isFinite(best) ? `best ${loss(best)}` : "not measured yet"],
      ...(run.test_loss ? [["Test loss", loss(run.test_loss), "at the best step"]] : []),
      ["Tokens/s", count(run.tokens_per_second), `${short(run.tokens)} so far`],
      ...(run.state === "training" ? [["Time left", duration(run.seconds_left), "at the speed so far"]] : []),
      ["Experts", run.has_experts ? count(run.experts) : NONE, run.has_experts ? `× ${run.layers} layers, ${run.top_k} a token` : "a dense model"],
    ];
    fill(this.numbers, (run.state === "merged" ? [] : numbers).map(([name, value, under]) => el("div", { class: "figure" }, el("dt", {}, name), el("dd", {}, value, el("small", {}, under)))));
    const tabs = this.available();
    if (!tabs.includes(this.tab)) this.tab = tabs.includes("branches") && run.state === "merged" ? "branches" : tabs[0];
    const key = tabs.join() + this.tab;
    if (key !== this.shown) {
      this.shown = key;
      const held = this.tabs.contains(document.activeElement);
      fill(this.tabs, tabs.map((tab) => el("a", { href: `#/run/${this.id}/${tab}`, "aria-current": tab === this.tab ? "page" : null }, TABS[tab])));
      fill(this.body, this.part(this.tab).node);
      const now = this.tabs.querySelector("[aria-current]");
      now?.scrollIntoView({ block: "nearest", inline: "nearest" });
      if (held) now?.focus(); // by keyboard one goes on from where one was
    }
    this.part(this.tab).update?.();
  }
}

class Curves {
  constructor(view) {
    this.view = view;
    this.loss = new Chart("Loss in nats a token", { wide: true, format: loss });
    this.charts = {
      gini: new Chart("Gini of the load, by layer", { zero: true }), entropy_bits: new Chart("Entropy of the load in bits, by layer", { empty: AT_EVALUATION }),
      experts_used: new Chart("Experts used, by layer", { zero: true, empty: AT_EVALUATION }), respawns: new Chart("Respawns so far, by layer", { zero: true }),
      gradient_norm: new Chart("Gradient norm"), tokens_per_second: new Chart("Tokens a second"), learning_rate: new Chart("Learning rate", { zero: true }),
    };
    this.node = el("div", { class: "charts" }, this.loss.node, Object.values(this.charts).map((chart) => chart.node));
  }
  recolour() {}
  update() {
    const { steps, evaluations } = this.view.log, run = this.view.run, x = steps.step || [], at = evaluations.map((e) => e.step);
    const series = [{ name: "training", color: kind(0), x, y: steps.train_loss || [], smooth: true }, { name: "validation", color: kind(1), x: at, y: evaluations.map((e) => e.val_loss), dots: true }];
    if (evaluations.some((e) => Number.isFinite(e.val_loss_padded))) series.push({ name: "validation, with padding", color: kind(4), x: at, y: evaluations.map((e) => e.val_loss_padded), dots: true, dash: [4, 3] });
    this.loss.set(series, run.published ? [{ y: run.published.val_loss, name: "published" + (run.published.padded ? " (counts padding)" : "") }] : []);
    const num = Math.max(0, ...evaluations.map((e) => e.layers.length));
    for (const name of ["gini", "entropy_bits", "experts_used", "respawns"]) {
      const layers = Array.from({ length: num }, (_, n) => ({ name: num > 12 ? `${n}` : `layer ${n}`, color: depth(n, num), x: at, y: evaluations.map((e) => e.layers[n]?.[name] ?? NaN), dots: true }));
      if (name === "gini" && steps.gini_middle?.some(Number.isFinite)) layers.unshift({ name: "middle layer, while training", color: depth(Math.floor(num / 2), num), x, y: steps.gini_middle, faint: true });
      this.charts[name].set(layers);
      this.charts[name].node.hidden = !run.has_experts || (name === "respawns" && !layers.some((one) => one.y.some(Number.isFinite)));
    }
    for (const name of ["gradient_norm", "tokens_per_second", "learning_rate"]) this.charts[name].set([{ name: name.replaceAll("_", " "), color: kind(0), x, y: steps[name] || [], smooth: name === "gradient_norm" }]);
  }
}

class Samples {
  constructor(view) {
    this.view = view;
    this.list = el("ol", { class: "samples", "aria-label": "Samples, the newest first" });
    this.none = el("p", { class: "empty" }, "Nothing was written yet: a run writes a sample every train.sample_every steps.");
    this.node = el("div", {}, this.none, this.list);
  }
  update() {
    const { samples } = this.view.log, key = `${samples.length}:${samples.at(-1)?.step}`;
    if (key === this.drawn) return;
    this.drawn = key;
    this.none.hidden = samples.length > 0;
    fill(this.list, samples.slice(-200).reverse().map(({ step, text }) => el("li", { class: "panel" }, el("h3", {}, `step ${count(step)}`), el("p", { class: "sample" }, text))));
  }
}

class Settings {
  constructor(view) {
    Object.assign(this, { view, against: "", words: "", only: false });
    this.pick = el("span"); this.table = el("tbody"); this.env = el("p", { class: "note" });
    const search = el("input", { type: "search", placeholder: "Search settings", "aria-label": "Search settings", oninput: () => { this.words = search.value.toLowerCase(); this.draw(); } });
    const only = el("input", { type: "checkbox", onchange: () => { this.only = only.checked; this.draw(); } });
    this.other = el("th", {}, ""); this.only_field = field("only what differs", only);
    this.node = el("div", { class: "panel stack" }, el("div", { class: "row" }, search, this.pick, this.only_field), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "setting"), el("th", {}, "this run"), this.other)), this.table)), this.env);
  }
  async update() {
    const others = [...store.runs.values()].filter((run) => run.id !== this.view.id), key = others.map((run) => run.id + run.name).join();
    if (key !== this.known) {
      this.known = key;
      fill(this.pick, field("compare with", choose([["", "nothing"], ...others.map((run) => [run.id, run.name])], this.against, (id) => { this.against = id; this.asked = ""; this.update(); })));
    }
    if (this.asked === this.view.id + this.against) return;
    this.asked = this.view.id + this.against;
    this.found = await askJson(`/runs/${this.view.id}/settings?against=${this.against}`);
    this.draw();
  }
  draw() {
    if (!this.found) return;
    const { rows, compared, env } = this.found, say = (value) => (value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));
    this.other.textContent = compared ? store.runs.get(this.against)?.name ?? "" : "";
    this.only_field.hidden = !compared;
    const differs = (row) => compared && JSON.stringify(row[1]) !== JSON.stringify(row[2]);
    fill(this.table, rows.filter((row) => row[0].toLowerCase().includes(this.words) && (!this.only || !compared || differs(row))).map((row) => el("tr", { class: differs(row) ? "differs" : "" }, el("td", { class: "mono" }, row[0].split(/(?<=[._])/).flatMap((part) => [part, el("wbr")])), el("td", {}, say(row[1]), differs(row) && el("span", { class: "hush" }, " (differs)")), el("td", {}, compared ? say(row[2]) : ""))));
    fill(this.env, env.command && el("code", {}, env.command), env.device && el("span", {}, ` on ${env.device}`), env.torch && `, torch ${env.torch}`);
  }
}
