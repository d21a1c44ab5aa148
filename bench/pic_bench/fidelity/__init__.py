"""How far answers after splicing are from a full prefill: experiments through the real server, records, reports.

The way of a prompt: `cases` make it with the requests that compute its donors, `arms` say how it is served, and `plan`
puts all of a run together: jobs, each a case under its arms, and passes, calls in order on a cache that lives on. Both
are served by requests of `target`: `measure` a job, `passes` the others. Each yields steps, whose records `compare`
makes of the logits by `metrics`, and `runner` writes them to the folder that `config` describes.
`compared` makes the cells of `summary`; `report` shows them in `tables`.
"""
