// All runs: how each stands, several on one chart, queues.
import { Chart, spark } from "./chart.js";
import { askJson, place, store } from "./net.js";
import { count, duration, el, fill, kind, loss, NONE, rgb } from "./dom.js";

const STATES = ["training", "finished", "merged", "pruned", "killed", "failed", "damaged", "gone"];
const JOBS = ["done", "running", "pruned", "interrupted", "failed"];
const MOST_SHOWN = 12, AGAIN_MS = 800; // so often at most a run's curve is asked for

export class RunsView {
  constructor() {
    this.words = ""; this.state = ""; this.what = "val";
    this.chosen = new Set(); this.touched = false; this.rows = new Map(); this.curves = new Map();
    this.chart = new Chart("Loss in nats a token", { wide: true, format: loss });
    this.head = el("p", { class: "lead", role: "status" });
    this.list = el("ul", { class: "runs", "aria-label": "Runs" });
    this.queues = el("div", { class: "stack" });
    this.filters = el("div", { class: "row", role: "group", "aria-label": "Show runs that are" });
    const search = el("input", { type: "search", placeholder: "Search names and folders", "aria-label": "Search runs", oninput: () => { this.words = search.value.toLowerCase(); this.update(); } });
    this.kinds = ["val", "train"].map((what) => el("button", { type: "button", "aria-pressed": String(what === this.what), onclick: () => { this.picked = true; this.show(what); }, value: what }, what === "val" ? "validation" : "training"));
    this.none = el("p", { class: "empty" });
    this.node = el("div", { class: "stack" }, el("div", {}, el("h1", {}, "Runs"), this.head), el("div", { class: "row", role: "group", "aria-label": "Which loss" }, this.kinds), this.chart.node, this.queues, el("div", { class: "row" }, search, this.filters), this.list, this.none);
    place("");
    this.timer = setInterval(() => this.fetchCurves(), AGAIN_MS / 4);
  }
  close() { clearInterval(this.timer); }
  show(what) { this.what = what; this.kinds.forEach((b) => b.setAttribute("aria-pressed", String(b.value === what))); this.draw(); }
  color(id) { return kind([...store.runs.keys()].indexOf(id)); }
  recolour() { this.rows.clear(); this.list.replaceChildren(); }

  update() {
    const runs = [...store.runs.values()].sort((a, b) => (b.state === "training") - (a.state === "training")), by = {}; // what goes on comes first
    for (const run of runs) by[run.state] = (by[run.state] || 0) + 1;
    this.head.textContent = runs.length ? `${runs.length} watched: ` + STATES.filter((s) => by[s]).map((s) => `${by[s]} ${s}`).join(", ") + "." : "Looking …";
    const states = STATES.filter((s) => by[s]).join();
    if (states !== this.states) {
      this.states = states;
      fill(this.filters, ["", ...STATES.filter((s) => by[s])].map((s) => el("button", { type: "button", "aria-pressed": String(s === this.state), onclick: (e) => { this.state = s; for (const b of this.filters.children) b.setAttribute("aria-pressed", String(b === e.currentTarget)); this.update(); } }, s || "all")));
    }
    if (!this.touched) this.chosen = new Set(runs.slice(0, MOST_SHOWN).map((run) => run.id));
    const shown = runs.filter((run) => (!this.state || run.state === this.state) && this.words.split(/\s+/).every((word) => `${run.name} ${run.folder} ${run.experiment || ""}`.toLowerCase().includes(word)));
    for (const run of runs) if (!this.rows.has(run.id)) this.rows.set(run.id, this.makeRow(run));
    const wanted = shown.map((run) => this.rows.get(run.id).node);
    if (wanted.length !== this.list.children.length || wanted.some((node, i) => node !== this.list.children[i])) fill(this.list, wanted);
    for (const run of shown) this.rows.get(run.id).fill(run);
    this.none.hidden = shown.length > 0;
    this.none.textContent = runs.length ? "No run is like that." : "No runs yet; some train makes one.";
    this.drawQueues();
    this.draw(); // curves may have come before it was known which are shown
    this.fetchCurves();
  }

  makeRow(run) {
    const box = el("input", { type: "checkbox", checked: this.chosen.has(run.id), "aria-label": `Show ${run.name} on the chart`, onchange: () => { this.touched = true; box.checked ? this.chosen.add(run.id) : this.chosen.delete(run.id); this.draw(); } });
    const link = el("a", { href: `#/run/${run.id}` }), badge = el("span", { class: "badge" }), under = el("small"), bar = el("progress", { max: 1 }), steps = el("small");
    const val = el("div", { class: "number" }), train = el("div", { class: "number" }), line = el("canvas", { "aria-hidden": "true" });
    const node = el("li", { class: "run panel" }, el("label", { class: "swatch" }, box, el("i", { style: { background: rgb(this.color(run.id)) } })), el("div", { class: "name" }, el("div", { class: "row" }, link, badge), under), el("div", { class: "progress" }, bar, steps), val, train, el("div", { class: "spark" }, line));
    return { node, line, fill: (r) => {
      if (this.rows.get(r.id).seen === r) return;
      this.rows.get(r.id).seen = r;
      box.checked = this.chosen.has(r.id);
      link.textContent = r.name; badge.textContent = r.state; badge.className = `badge ${r.state}`;
      under.textContent = [r.folder, r.experiment && `repeats ${r.experiment}`, r.note].filter(Boolean).join(" · ");
      bar.hidden = steps.hidden = !r.steps; bar.value = r.steps ? Math.min(1, (r.step || 0) / r.steps) : 0;
      bar.setAttribute("aria-label", `${r.name}: step ${count(r.step)} of ${count(r.steps)}`);
      steps.textContent = `step ${count(r.step)}` + (r.steps ? ` of ${count(r.steps)}` : "") + (r.seconds_left ? ` · about ${duration(r.seconds_left)} left` : "");
      fill(val, loss(r.val_loss), el("small", {}, "validation")); fill(train, loss(r.train_loss), el("small", {}, "training"));
      this.sparkle(r.id);
    } };
  }

  async fetchCurves() { // of runs that have grown since
    for (const run of store.runs.values()) {
      const known = this.curves.get(run.id), now = Date.now();
      if (known && (known.size === run.size || now - known.at < AGAIN_MS)) continue;
      this.curves.set(run.id, { ...(known || { train: [], val: [] }), size: run.size, at: now });
      askJson(`/runs/${run.id}/curve`).then((found) => { Object.assign(this.curves.get(run.id), found); this.sparkle(run.id); this.picked ? this.draw() : this.show(this.usual()); }, () => Object.assign(this.curves.get(run.id), { size: null, at: now + 5000 })); // what failed is tried again
    }
  }
  usual() { // validation, unless a run that trains was not measured twice yet: then nothing of it would be seen
    const few = ([id, curve]) => curve.val.length < 2 && store.runs.get(id)?.state === "training", all = [...this.curves];
    return all.some(([, curve]) => curve.val.length > 1) && !all.some(few) ? "val" : "train";
  }
  sparkle(id) {
    const row = this.rows.get(id), curve = this.curves.get(id);
    if (row?.line.isConnected && curve) spark(row.line, curve.train.length > 1 ? curve.train : curve.val, this.color(id));
  }
  draw() {
    const series = [], lines = new Map();
    for (const id of this.chosen) {
      const run = store.runs.get(id), points = this.curves.get(id)?.[this.what] || [];
      if (!run || !points.length) continue;
      series.push({ name: run.name + ([...store.runs.values()].some((r) => r.id !== id && r.name === run.name) ? ` (${run.folder})` : ""), color: this.color(id), x: points.map((p) => p[0]), y: points.map((p) => p[1] ?? NaN), dots: this.what === "val", smooth: this.what === "train" });
      if (run.published && this.what === "val") lines.set(run.published.val_loss, { y: run.published.val_loss, name: `${run.experiment}, published${run.published.padded ? " (counts padding)" : ""}` });
    }
    this.chart.set(series, [...lines.values()]);
  }
  drawQueues() {
    const text = JSON.stringify(store.queues);
    if (text === this.drawn) return;
    this.drawn = text;
    fill(this.queues, store.queues.map(({ folder, kind: what, total, jobs, best }) => {
      const by = (state) => jobs.filter((job) => job.state === state), many = { ...Object.fromEntries(JOBS.map((s) => [s, by(s).length])), waiting: total - jobs.length + by("waiting").length };
      const parts = [...JOBS, "waiting"].filter((s) => many[s]), words = parts.map((s) => `${count(many[s])} ${s}`).join(", "), run = best && [...store.runs.values()].find((r) => r.folder === `${folder}/${best.name}`);
      return el("section", { class: "panel" }, el("h2", {}, `${what === "sweep" ? "Sweep" : "Queue"} in ${folder}`), el("div", { class: "queue", role: "img", "aria-label": words }, parts.filter((s) => s !== "waiting").map((s) => el("i", { class: s, style: { width: `${(100 * many[s]) / total}%` } }))),
        el("ul", { class: "legend" }, parts.map((s) => el("li", {}, el("i", { class: s }), `${count(many[s])} ${s}`)), el("li", {}, `of ${count(total)} ${what === "sweep" ? "trials" : "jobs"}`)),
        best && el("p", { class: "note" }, "Best so far: ", run ? el("a", { href: `#/run/${run.id}` }, best.name) : best.name, `, ${best.metric} ${loss(best.value)} with `, el("code", {}, best.settings)),
        by("failed").slice(0, 20).map((job) => el("p", { class: "note bad" }, `${job.name}: ${job.reason || NONE}`)));
    }));
  }
}
