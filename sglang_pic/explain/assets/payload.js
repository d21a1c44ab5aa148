// What the page was given: reads the compressed payload and gives its rows names.
// Every text in it came from logs: it goes into the page as text nodes and onto canvases only, never as markup.

const PREFIX = "prefix";
const RUN = "run";
const GAP = "gap";

async function readPayload() {
  const holder = document.getElementById("payload");
  const packed = atob(holder.textContent);
  holder.remove();
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i += 1) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

// Positions in the rows are those of the structs in data.py.
function buildModel(payload) {
  const { texts } = payload;
  const sessions = payload.sessions.map(([file, name], number) => ({
    number, file: payload.files[file], name, calls: [], longest: 1, promptLen: 0, prefixLen: 0, hitLen: 0, lost: 0,
  }));
  const causes = new Map(payload.causes.map(([key, label, advice]) => [key, { key, label, advice, groups: [], calls: 0, lost: 0, behind: 0 }]));
  const groups = payload.groups.map(([cause, signature, calls, lost, behind, worst], number) => (
    { number, cause: causes.get(cause), signature, numCalls: calls, lost, behind, worst, calls: [] }
  ));
  const calls = payload.calls.map((row, number) => {
    const [session, index, agent, promptLen, answerLen, prefixLen, runs, spanTexts, found] = row;
    let hitLen = 0;
    for (let i = 0; i < runs.length; i += 5) hitLen += runs[i + 1] - runs[i];
    const call = {
      number, session: sessions[session], index, agent: payload.agents[agent], promptLen, answerLen, prefixLen, runs, spanTexts, hitLen,
      found: found && {
        group: groups[found[0]], at: found[1], oldLen: found[2], newLen: found[3],
        before: texts[found[4]], old: texts[found[5]], new: texts[found[6]], after: texts[found[7]], neighbor: found[8],
      },
    };
    call.lost = call.found ? hitLen : 0;
    call.session.calls.push(call);
    call.session.longest = Math.max(call.session.longest, lengthWithAnswer(call));
    call.session.promptLen += promptLen;
    call.session.prefixLen += prefixLen;
    call.session.hitLen += hitLen;
    call.session.lost += call.lost;
    if (call.found) call.found.group.calls.push(call);
    return call;
  });
  for (const group of groups) {
    group.calls.sort((a, b) => b.lost - a.lost || a.number - b.number);
    const { cause } = group;
    cause.groups.push(group);
    cause.calls += group.numCalls;
    cause.lost += group.lost;
    cause.behind += group.behind;
  }
  const worstFirst = (a, b) => b.lost - a.lost || b.behind - a.behind;
  for (const cause of causes.values()) cause.groups.sort(worstFirst);
  const appending = calls.filter((call) => !call.found && call.hitLen);
  return {
    appending, payload, texts, sessions, groups, calls,
    causes: [...causes.values()].filter((cause) => cause.calls).sort(worstFirst),
  };
}

function lengthWithAnswer(call) {
  return call.promptLen + call.answerLen;
}

// The prefix, then every gap and run in order, as `_spans` in data.py walks them.
function spansOf(model, call) {
  const spans = [];
  const push = (kind, start, end, run) => {
    spans.push({ kind, start, end, run, text: model.texts[call.spanTexts[spans.length]] });
  };
  push(PREFIX, 0, call.prefixLen);
  let at = call.prefixLen;
  const { runs } = call;
  for (let i = 0; i < runs.length; i += 5) {
    const [start, end, shift, seamLen, donor] = runs.slice(i, i + 5);
    if (start > at) push(GAP, at, start);
    push(RUN, start, end, { shift, seamLen, donor: model.calls[donor] });
    at = end;
  }
  if (at < call.promptLen) push(GAP, at, call.promptLen);
  return call.prefixLen > 0 ? spans : spans.slice(1);
}
