"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const play = find("play"), time = find("time"), step = find("step"), choice = find("layer");
  const trails = find("trails"), plot = find("plot"), about = find("about");
  const last = data.steps.length - 1;
  const wholeTour = Math.min(16000, Math.max(6000, 250 * last));  // milliseconds
  const margin = 34, mostNumbers = 32;
  let layer = data.layers[0], experts = [], chosen = null;
  let place = 0;  // in snapshots, with fractions while it plays
  let playing = false, before = null;  // the time of the frame before, where there was one

  function make(name, attributes, parent) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    parent.appendChild(node);
    return node;
  }

  // Between two snapshots a value is on its way from one to the other.
  function between(rows, pick) {
    const low = Math.floor(place), high = Math.min(last, low + 1), share = place - low;
    return pick(rows[low]) * (1 - share) + pick(rows[high]) * share;
  }

  function scale() {
    const width = plot.clientWidth, height = plot.clientHeight;
    const size = Math.min((width - 2 * margin) / layer.width, (height - 2 * margin) / layer.height);
    return {
      width, height,
      x: (x) => width / 2 + (x - layer.width / 2) * size,
      y: (y) => height / 2 - (y - layer.height / 2) * size,
    };
  }

  function build() {
    const view = scale();
    plot.setAttribute("viewBox", "0 0 " + view.width + " " + view.height);
    plot.replaceChildren();
    make("text", { class: "axis", x: view.width - 10, y: view.height - 10, "text-anchor": "end" }, plot).textContent = layer.xLabel;
    make("text", { class: "axis", x: 10, y: 18 }, plot).textContent = layer.yLabel;
    experts = layer.hues.map((hue, number) => {
      const group = make("g", { class: "expert", style: "--hue:" + hue }, plot);
      const start = layer.paths[0];
      const node = {
        group,
        way: make("polyline", { class: "way" }, group),
        start: make("circle", { class: "start", r: 4, cx: view.x(start[2 * number]), cy: view.y(start[2 * number + 1]) }, group),
        key: make("circle", { class: "key" }, group),
        reach: make("circle", { class: "reach", r: 18 }, group),
        text: null,
        points: layer.paths.map((row) => view.x(row[2 * number]).toFixed(1) + "," + view.y(row[2 * number + 1]).toFixed(1)),
      };
      if (layer.hues.length <= mostNumbers) node.text = make("text", {}, group);
      group.addEventListener("click", () => { chosen = chosen === number ? null : number; draw(); });
      return node;
    });
    draw();
  }

  function draw() {
    const view = scale();
    const low = Math.floor(place);
    // Of many experts only the last stretch of the way is drawn: a page must stay quick.
    const from = experts.length > 64 ? Math.max(0, low - 12) : 0;
    experts.forEach((node, number) => {
      const x = view.x(between(layer.paths, (row) => row[2 * number]));
      const y = view.y(between(layer.paths, (row) => row[2 * number + 1]));
      const load = between(layer.usage, (row) => row[number]);
      const radius = Math.min(17, 3 + 4.5 * Math.sqrt(load)) * (experts.length > 64 ? 0.6 : 1);
      for (const circle of [node.key, node.reach]) { circle.setAttribute("cx", x); circle.setAttribute("cy", y); }
      node.key.setAttribute("r", radius);
      const way = trails.checked ? node.points.slice(from, low + 1).join(" ") + " " + x.toFixed(1) + "," + y.toFixed(1) : "";
      node.way.setAttribute("points", way);
      Object.assign(node, { x, y, radius });
      node.group.classList.toggle("chosen", number === chosen);
    });
    if (experts[0].text) label();
    plot.classList.toggle("following", chosen !== null);
    time.value = Math.round(place);
    const now = "step " + Math.round(between(data.steps, (s) => s)).toLocaleString("en");
    step.textContent = now;
    time.setAttribute("aria-valuetext", now);
    about.textContent = describe();
  }

  // Points that lie together share one label; else no number could be read.
  function label() {
    const groups = [];
    experts.forEach((node, number) => {
      const near = groups.find((group) => Math.abs(group.node.x - node.x) < 30 && Math.abs(group.node.y - node.y) < 13);
      if (near) { near.numbers.push(number); node.text.textContent = ""; } else { groups.push({ node, numbers: [number] }); }
    });
    for (const { node, numbers } of groups) {
      node.text.textContent = numbers.join(", ");
      node.text.setAttribute("x", node.x + node.radius * 0.75 + 2);
      node.text.setAttribute("y", node.y - node.radius * 0.75 - 1);
    }
  }

  function describe() {
    if (layer.still) return "No key of this layer moved.";
    if (chosen === null) {
      const distance = layer.hues.reduce((sum, _, number) => sum + between(layer.distance, (row) => row[number]), 0);
      return "Mean distance of the keys from where they began: " + (distance / layer.hues.length).toFixed(2) + " (a key begins at length 1).";
    }
    const load = between(layer.usage, (row) => row[chosen]).toFixed(2);
    const distance = between(layer.distance, (row) => row[chosen]).toFixed(2);
    return "Expert " + chosen + ": " + load + " fair shares of the load, " + distance + " from where it began. Choose it again to let it go.";
  }

  function setPlaying(on) {
    playing = on;
    play.textContent = on ? "Pause" : "Play";
    play.setAttribute("aria-pressed", String(on));
    about.setAttribute("aria-live", on ? "off" : "polite");  // nobody wants to hear sixty sentences a second
    if (on) {
      if (place >= last) place = 0;
      before = null;
      draw();
      requestAnimationFrame(tick);
    }
  }

  function tick(now) {
    if (!playing) return;
    if (before !== null) place = Math.min(last, place + (now - before) / wholeTour * last);
    before = now;
    draw();
    if (place >= last) setPlaying(false); else requestAnimationFrame(tick);
  }

  time.max = last;
  data.layers.forEach((one, number) => choice.add(new Option(one.layer, number)));
  play.addEventListener("click", () => setPlaying(!playing));
  time.addEventListener("input", () => { setPlaying(false); place = Number(time.value); draw(); });
  choice.addEventListener("change", () => { layer = data.layers[Number(choice.value)]; chosen = null; build(); });
  trails.addEventListener("change", draw);
  new ResizeObserver(build).observe(plot);
  place = last;  // at rest the page shows the whole way
  build();
})();
