// Every element with data-trace holds its trace as JSON. Text enters the page as text, never as markup.
(() => {
  "use strict";

  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const percent = (share) => (share >= 0.995 ? "over 99 %" : share < 0.005 ? "under 1 %" : `${Math.round(100 * share)} %`);
  const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

  function mount(root, data) {
    const tokens = data.tokens;
    let place = Math.floor(data.layers.length / 2); // the layer that colours the text
    let pinned = Math.min(1, tokens.length - 1); // the token whose path stays in view
    let shown = pinned;
    let marked = null; // {place, expert} whose tokens are marked

    // --- the parts ---------------------------------------------------------------------------------------
    const bar = make("div", "trace-bar");
    const switcher = make("fieldset", "trace-layers");
    switcher.append(make("legend", "", "Colour by layer"));
    const group = `layer-${Math.random().toString(36).slice(2)}`;
    data.layers.forEach((layer, number) => {
      const label = make("label");
      const input = make("input");
      Object.assign(input, { type: "radio", name: group, value: String(layer), checked: number === place });
      input.addEventListener("change", () => setLayer(number));
      label.append(input, make("span", "", String(layer)));
      switcher.append(label);
    });
    bar.append(switcher, make("span", "", "Point at a token to see its path; click an expert to find its tokens."));

    const body = make("div", "trace-body");
    const text = make("div", "trace-text");
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", "The tokens of the text; arrow keys move between them");
    const spans = tokens.map((token, number) => {
      const special = token.text.startsWith("<|") && token.text.endsWith("|>");
      const span = make("span", special ? "token special" : "token", special ? token.text.slice(2, -2) : token.text.replaceAll("\n", "⏎\n"));
      span.setAttribute("role", "button");
      span.tabIndex = number === pinned ? 0 : -1;
      span.addEventListener("mouseenter", () => showPath(number));
      span.addEventListener("focus", () => showPath(number));
      span.addEventListener("click", () => pin(number));
      return span;
    });
    text.append(...spans);
    text.addEventListener("mouseleave", () => showPath(pinned));
    text.addEventListener("keydown", (event) => {
      const jumps = { ArrowRight: shown + 1, ArrowLeft: shown - 1, Home: 0, End: tokens.length - 1 };
      if (event.key === "Enter" || event.key === " ") pin(shown);
      else if (event.key in jumps) {
        const next = Math.max(0, Math.min(tokens.length - 1, jumps[event.key]));
        pin(next);
        spans[next].focus();
      } else return;
      event.preventDefault();
    });
    const path = make("aside", "trace-path");
    path.setAttribute("aria-label", "The path of the chosen token");
    path.setAttribute("aria-live", "polite");
    body.append(text, path);

    const experts = make("div", "trace-experts");
    const status = make("p", "trace-status");
    status.setAttribute("role", "status");
    root.append(bar, body, experts);
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape") setMark(null);
    });

    // --- what changes ------------------------------------------------------------------------------------
    const isMarked = (at, expert) => marked !== null && marked.place === at && marked.expert === expert;

    function expertButton(at, expert, note, gate) {
      const button = make("button", gate === undefined ? "expert" : "expert gate");
      button.type = "button";
      button.style.setProperty("--hue", data.hues[expert]);
      if (gate !== undefined) button.style.setProperty("--gate", `${100 * gate}%`);
      button.append(make("span", "", String(expert)), make("small", "", note));
      button.setAttribute("aria-pressed", String(isMarked(at, expert)));
      button.setAttribute("aria-label", `expert ${expert} in layer ${data.layers[at]}, ${note}`);
      button.dataset.expert = expert;
      button.dataset.layer = data.layers[at];
      button.addEventListener("click", () => setMark(isMarked(at, expert) ? null : { place: at, expert }));
      return button;
    }

    function colour() {
      spans.forEach((span, number) => {
        const chosen = tokens[number].experts[place];
        const uses = marked !== null && tokens[number].experts[marked.place].includes(marked.expert);
        span.style.setProperty("--hue", data.hues[uses ? marked.expert : chosen[0]]);
        span.classList.toggle("marked", uses);
        span.classList.toggle("dimmed", marked !== null && !uses);
      });
    }

    function listExperts() {
      const counts = new Map();
      for (const token of tokens) for (const expert of token.experts[place]) counts.set(expert, (counts.get(expert) || 0) + 1);
      const sorted = [...counts].sort((a, b) => b[1] - a[1] || a[0] - b[0]);
      const most = 40;
      const buttons = sorted.slice(0, most).map(([expert, count]) => expertButton(place, expert, `× ${count}`));
      status.textContent =
        marked === null
          ? `Layer ${data.layers[place]}: ${plural(sorted.length, "expert")} of ${data.hues.length} at work on this text.`
          : `Expert ${marked.expert} of layer ${data.layers[marked.place]} runs for ${counts.get(marked.expert) || 0} of ${plural(tokens.length, "token")}. Click it again, or press Escape, to clear.`;
      experts.replaceChildren(status, ...buttons);
      if (sorted.length > most) experts.append(make("span", "", `and ${sorted.length - most} more`));
    }

    function describeNext(number) {
      const token = tokens[number];
      const line = make("p");
      if (token.next_probability === null) line.append("The text ends here.");
      else {
        line.append("Next is ");
        line.append(number + 1 < tokens.length ? make("q", "", tokens[number + 1].text.trim() || "␣") : "the rest of the story");
        line.append(`, foreseen with ${percent(token.next_probability)} (${token.next_nats.toFixed(2)} nats).`);
      }
      if (token.guess !== null) {
        line.append(" Likeliest: ", make("q", "", token.guess.trim() || "␣"), `, ${percent(token.guess_probability)}.`);
      }
      return line;
    }

    function showPath(number) {
      spans[shown].classList.remove("current");
      shown = number;
      spans[shown].classList.add("current");
      const token = tokens[number];
      const list = make("ol");
      data.layers.forEach((layer, at) => {
        const row = make("li", at === place ? "here" : "");
        const chips = make("div");
        token.experts[at].forEach((expert, k) => chips.append(expertButton(at, expert, token.gates[at][k].toFixed(2), token.gates[at][k])));
        row.append(make("span", "", `Layer ${layer}`), chips);
        list.append(row);
      });
      path.replaceChildren(make("h4", "", token.text.trim() || "␣"), describeNext(number), list);
    }

    function pin(number) {
      spans[pinned].tabIndex = -1;
      pinned = number;
      spans[pinned].tabIndex = 0;
      showPath(number);
    }

    function setLayer(number) {
      place = number;
      marked = null;
      refresh();
    }

    function setMark(next) {
      marked = next;
      if (next !== null) place = next.place;
      switcher.querySelectorAll("input")[place].checked = true;
      refresh();
    }

    function refresh() {
      const active = document.activeElement;
      const held = active instanceof HTMLButtonElement && root.contains(active) ? { ...active.dataset, inPath: path.contains(active) } : null;
      colour();
      listExperts();
      showPath(shown);
      // Buttons were made anew: the one that had the focus gets it back.
      if (held) (held.inPath ? path : experts).querySelector(`[data-expert="${held.expert}"][data-layer="${held.layer}"]`)?.focus();
    }

    refresh();
  }

  for (const root of document.querySelectorAll("[data-trace]")) {
    mount(root, JSON.parse(root.querySelector('script[type="application/json"]').textContent));
  }
})();
