// The card about one span: its text, its donor, and why the prefix ended.

const CARD_GAP = 8;
const FIELDS_SHOWN = 2;

class Card {
  constructor(painter, jump) {
    this.painter = painter;
    this.jump = jump;
    this.node = document.getElementById("card");
    this.shown = null;
  }

  // `anchor` is the row's box and the pointer's x; docked cards (touch, keyboard on small screens) have buttons.
  show(call, span, anchor, docked) {
    const key = `${call.number}:${span.start}:${docked}`;
    if (this.shown !== key) {
      this.shown = key;
      this.node.replaceChildren(...this.content(call, span, docked));
      this.node.classList.toggle("docked", docked);
    }
    this.node.classList.remove("hidden");
    if (docked) {
      this.node.style.left = this.node.style.top = "";
      return;
    }
    const { width, height } = this.node.getBoundingClientRect();
    const left = Math.min(Math.max(12, anchor.x - 60), document.documentElement.clientWidth - width - 12);
    const below = anchor.bottom + CARD_GAP;
    const top = below + height < window.innerHeight ? below : Math.max(4, anchor.top - CARD_GAP - height);
    this.node.style.left = `${Math.round(left)}px`;
    this.node.style.top = `${Math.round(top)}px`;
  }

  hide() {
    this.shown = null;
    this.node.classList.add("hidden");
  }

  content(call, span, docked) {
    const length = span.end - span.start;
    const swatch = element("i");
    swatch.style.background = this.painter.colourOf(span);
    const names = { [PREFIX]: "Prefix hit", [RUN]: "Chunk hit", [GAP]: span.isGuarded ? "Computed because of a changed field" : "Computed" };
    const nodes = [
      element("h3", "", swatch, `${names[span.kind]}: ${plural(length, "token")}`),
      element("p", "muted", `${nameOf(call)}, tokens [${count(span.start)}, ${count(span.end)}) of ${count(call.promptLen)}`),
    ];
    if (span.kind === RUN) nodes.push(this.donorLine(call, span));
    nodes.push(...this.fieldLines(call, span));
    const { found } = call;
    const isBroken = found && span.kind === GAP && span.start === call.prefixLen && !isRewind(found);
    if (isBroken) {
      const behind = call.lost ? `; ${plural(call.lost, "token")} behind it were there before` : "";
      nodes.push(element("p", "", element("b", "", found.group.cause.label), ` broke the prefix here (${sizes(found)})${behind}.`));
      nodes.push(diff(found));
    } else {
      const seam = call.spans.find(({ start }) => start === span.end)?.seamLen;
      if (seam) nodes.push(element("p", "", length === seam ? "the seam of the run behind it" : `its last ${plural(seam, "token")}: the seam of the run behind it`));
      nodes.push(element("pre", "", span.text || "(no text is kept for this span)"));
    }
    if (docked) {
      const buttons = element("div", "buttons");
      if (span.kind === RUN) buttons.append(button("Go to the donor", () => this.jump(call, span)));
      buttons.append(button("Close", () => this.hide()));
      nodes.push(buttons);
    } else if (span.kind === RUN) {
      nodes.push(element("p", "muted", "Click or press Enter to go to the donor."));
    }
    return nodes;
  }

  // The changed fields that a span holds, or those behind which it is spliced or computed.
  fieldLines(call, span) {
    const isBehind = span.isBehindChange || span.isGuarded;
    const fields = call.changedFields.filter(({ start }) => (isBehind ? start < span.end : span.start <= start && start < span.end));
    // The card says what broke the prefix in any case.
    const shown = fields.filter(({ start }) => isBehind || !call.found || start !== call.found.at);
    if (!shown.length) return [];
    const what = shown.length === 1 ? "a changed field" : `${count(shown.length)} changed fields`;
    const said = span.isGuarded ? "It may draw on" : isBehind ? "Spliced behind" : "Holds";
    const nearest = shown.filter((field) => field.old || field.new).slice(-FIELDS_SHOWN);
    return [element("p", "", element("b", "", `${said} ${what}`), nearest.length < shown.length ? "; the nearest:" : ":"), ...nearest.map(diff)];
  }

  donorLine(call, { start, end, donor, shift, seamLen }) {
    const where = donor.session === call.session ? `call ${donor.index} of this session` : nameOf(donor);
    const from = `[${count(start - shift)}, ${count(end - shift)})`;
    const part = start - shift >= donor.promptLen ? " of its answer" : "";
    const seam = seamLen ? `, seam: ${plural(seamLen, "token")} before it computed` : ", no seam: same context";
    return element("p", "", "from ", element("b", "", where), ` at ${from}${part}, shift ${signed(shift)}${seam}`);
  }
}
