"""How far answers after splicing are from a full prefill: experiments through the real server, records, reports.

The way of a prompt: `cases` make it with the requests that compute its donors, `arms` say how it is served, `plan` puts
all of a run together. `measure` serves a case under every arm of its job, by requests of `target`, and compares the
logits by `metrics`; `passes` do so for calls whose cache lives on. `runner` writes a `record` of each to the `folder`.
`compared` and `recovery` (EDITS) make the cells of `summary`; `report` shows them in `tables` and `pictures`.
"""
