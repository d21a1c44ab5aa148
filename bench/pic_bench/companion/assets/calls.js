// One call on two servers: bars of tokens, and what a piece of the prompt is.

const KINDS = { prefix: "prefix hit", moved: "spliced", seam: "seam", computed: "computed", field: "changed field, computed" };

class Calls {
  constructor(scenes, texts) {
    Object.assign(this, { scenes, texts, chosen: 0, at: 3 });
    this.lists = { scene: byId("scene"), session: byId("session"), call: byId("call") };
    fill(this.lists.scene, scenes, (scene) => scene.title);
    this.lists.scene.addEventListener("change", () => this.showScene());
    this.lists.session.addEventListener("change", () => this.showSession());
    this.lists.call.addEventListener("input", () => {
      this.at = Number(this.lists.call.value);
      this.showCall();
    });
    this.showScene();
    // One that shows most: a later call of a session with tools, behind the clock.
    this.lists.session.value = Math.min(1, this.sessions.length - 1);
    this.showSession();
  }

  showScene() {
    const before = this.lists.session.value;
    this.scene = this.scenes[this.lists.scene.value || 0];
    this.sessions = [...Map.groupBy(this.scene.calls, (call) => call.session).values()];
    fill(this.lists.session, this.sessions, ([first]) => first.session);
    this.lists.session.value = before || 0;
    byId("call-record").textContent = code(this.scene.record);
    this.showSession();
  }

  showSession() {
    this.calls = this.sessions[this.lists.session.value];
    this.lists.call.max = this.calls.length - 1;
    this.lists.call.value = Math.min(this.at, this.calls.length - 1);
    const sum = (read) => this.calls.reduce((total, call) => total + read(call), 0);
    const [stock, patched] = [sum((call) => call.promptLen - call.stockPrefixLen), sum((call) => call.promptLen - call.prefixLen - call.movedLen)];
    byId("call-sum").textContent = `All ${this.calls.length} calls of this session: stock computed ${count(stock)} tokens, sglang_pic ${count(patched)}.`;
    this.showCall();
  }

  showCall() {
    const call = (this.call = this.calls[this.lists.call.value]);
    byId("call-name").textContent = `${call.index + 1} of ${this.calls.length}`;
    this.lists.call.setAttribute("aria-valuetext", `call ${call.index + 1} of ${this.calls.length}`);
    const stock = [["prefix", call.stockPrefixLen], ["computed", call.promptLen - call.stockPrefixLen]];
    const gain = call.stockTtftS / call.ttftS;
    byId("servers").replaceChildren(
      this.server("stock SGLang", call.stockTtftS, this.plainBar(stock), stock, ""),
      this.server("sglang_pic", call.ttftS, this.pieceBar(call), this.sums(call), gain >= 1.1 ? `, ${gain.toFixed(1)}x sooner` : ""),
    );
    const lengths = this.pieces.map((piece) => (piece.kind === "moved" ? piece.end - piece.start : 0));
    this.select(lengths.indexOf(Math.max(...lengths)), false);
  }

  sums(call) {
    return [["prefix", call.prefixLen], ["moved", call.movedLen], ["computed", call.promptLen - call.prefixLen - call.movedLen]];
  }

  server(name, ttft, bar, sums, note) {
    const told = sums.filter(([, tokens]) => tokens).map(([kind, tokens]) => `${count(tokens)} ${KINDS[kind]}`);
    const time = element("span", "ttft", seconds(ttft));
    time.title = "time to the first token";
    return element("div", "server", element("b", "", name), bar, time, element("p", "", `${told.join(", ")}; first token after ${seconds(ttft)}${note}`));
  }

  plainBar(sums) {
    const bar = element("div", "bar");
    for (const [kind, tokens] of sums.filter(([, tokens]) => tokens)) bar.append(this.grown(element("span", kind), tokens));
    return bar;
  }

  pieceBar(call) {
    let start = 0;
    this.pieces = (call.pieces ?? []).map((piece) => {
      const found = { shift: 0, ...piece, start, text: this.texts[piece.text ?? 0], old: this.texts[piece.old ?? 0] };
      start = piece.end;
      return found;
    });
    if (!this.pieces.length) return this.plainBar(this.sums(call));
    const bar = element("div", "bar");
    bar.setAttribute("role", "group");
    bar.setAttribute("aria-label", "pieces of the prompt, arrow keys to go through them");
    this.buttons = this.pieces.map((piece, number) => {
      const node = this.grown(button("", () => this.select(number, true), piece.kind), piece.end - piece.start);
      node.setAttribute("aria-label", `${KINDS[piece.kind]}, ${plural(piece.end - piece.start, "token")}`);
      return node;
    });
    bar.append(...this.buttons);
    bar.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      this.select(Math.min(Math.max(this.chosen + step, 0), this.pieces.length - 1), true);
      event.preventDefault();
    });
    return bar;
  }

  grown(node, tokens) {
    node.style.flexGrow = tokens;
    return node;
  }

  select(number, isFocused) {
    const box = byId("piece");
    if (!this.pieces.length) return box.replaceChildren(element("p", "", "Today's planner would splice other tokens of this prompt than the recorded server did, so its pieces are not drawn."));
    this.chosen = Math.max(0, number);
    this.buttons.forEach((node, at) => {
      node.setAttribute("aria-pressed", at === this.chosen);
      node.tabIndex = at === this.chosen ? 0 : -1;
    });
    if (isFocused) this.buttons[this.chosen].focus();
    const piece = this.pieces[this.chosen];
    const told = [`${KINDS[piece.kind]}: ${plural(piece.end - piece.start, "token")}, ${count(piece.start)} to ${count(piece.end)} of ${count(this.call.promptLen)}`];
    if (piece.kind === "moved") {
      const donor = this.scene.calls[piece.donor ?? 0];
      told.push(`from call ${donor.index + 1}${donor.session === this.call.session ? "" : ` of ${donor.session}`}, ${piece.shift ? `moved by ${signed(piece.shift)} positions` : "at the same position"}`);
    }
    if (piece.kind === "seam") told.push("the first tokens of the run behind it, which had other text before them");
    box.replaceChildren(element("p", "", element("b", "", told[0]), told[1] ? `; ${told[1]}` : ""));
    if (piece.kind === "field") box.append(element("p", "diff", element("del", "", visible(piece.old) || "nothing"), " → ", element("ins", "", visible(piece.text))));
    else box.append(element("pre", "", piece.text));
    return undefined;
  }
}
