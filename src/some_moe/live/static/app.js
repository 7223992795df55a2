// The page: where it is, what it knows, and one stream that tells it what is new.
import { el, fill } from "./dom.js";
import { ask, lines, Log, store } from "./net.js";
import { RunsView } from "./runs.js";
import { RunView } from "./run.js";

// --- the stream: server-sent events by fetch, so that the token stays out of addresses ------------------------------
const link = document.getElementById("link");
function state(text, kind) { link.textContent = text; link.className = "link " + kind; }
class Stream {
  constructor() { this.tries = 0; document.addEventListener("visibilitychange", () => this.start(this.log)); }
  start(log) { // log: of the run whose logs are wanted too
    this.stop();
    this.log = log;
    if (document.hidden) return; // a tab that nobody looks at asks for nothing
    const control = (this.control = new AbortController());
    this.run(control).catch((error) => {
      if (control.signal.aborted) return;
      if (error.status === 401) { state("no access", "off"); current?.close?.(); return view(noAccess()); }
      if (error.status === 404 && log) return state("no such run", "off");
      state("the server is away", "off");
      this.timer = setTimeout(() => this.start(this.log), Math.min(5000, 500 * 2 ** this.tries++));
    });
  }
  stop() { clearTimeout(this.timer); this.control?.abort(); }
  async run(control) {
    const log = this.log, query = log ? "?" + new URLSearchParams({ run: log.id, ...log.places }) : "";
    const answer = await ask("/events" + query, undefined, control.signal);
    state("live", "on");
    let name = "";
    for await (const line of lines(answer)) {
      this.tries = 0;
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) this.take(name, JSON.parse(line.slice(6)), log);
    }
    throw new Error("it ended");
  }
  take(name, data, log) {
    if (name === "hello") { store.names = data; if (log && !log.places.metrics) log.clear("metrics"); return; }
    if (name === "runs") for (const run of data) store.runs.set(run.id, run);
    else if (name === "queues") store.queues = data;
    else if (name === "again") { log.clear(data.log); log.places[data.log] = data.place; }
    else if (log && (name === "metrics" || name === "samples")) log.add(name, data);
    later();
  }
}
const stream = new Stream();
let waiting = 0, current = null;
function later() { // many events, one drawing
  if (!waiting) waiting = setTimeout(() => { waiting = 0; current?.update?.(); }, 60);
}

// --- where we are -----------------------------------------------------------------------------------------------------
const main = document.getElementById("main");
const view = (node) => fill(main, node);
const noAccess = () => el("div", { class: "panel empty" }, el("h1", {}, "This tab has no access"), el("p", { class: "lead" }, "Open the address that ", el("code", {}, "some watch"), " printed, with all that stands behind the #. A new start of it has a new one."));

function route() {
  const [, kind, id, tab] = location.hash.slice(1).split("/");
  const same = current instanceof RunView && kind === "run" && current.id === id;
  if (same) current.show(tab || "curves");
  else {
    current?.close?.();
    if (kind === "run" && id) {
      const log = new Log(id);
      current = new RunView(id, log, tab || "curves");
      stream.start(log);
    } else {
      current = new RunsView();
      stream.start(null);
    }
    view(current.node);
    main.focus({ preventScroll: true });
  }
  current.update?.();
}
addEventListener("hashchange", route);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { current?.recolour?.(); current?.update?.(); });
addEventListener("unhandledrejection", (event) => { if (event.reason?.name === "AbortError" || event.reason?.status) event.preventDefault(); });
if (/^#main$/.test(location.hash)) history.replaceState(null, "", "#/");
route();
