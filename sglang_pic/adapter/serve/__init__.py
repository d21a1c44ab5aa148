"""The stations of a request on its way through the server, in order.

frontend, options     HTTP 400 for bad options
scheduler             gives the request its options, its namespace and a `state`
admission             SGLang's `PrefillAdder`: plans the request, charges computed tokens only, counts in `accounting`
planning, resolver    a plan (by `core`) and its locked donors, or a reason from `fallback`
forward, gap_batch    moves donors' rows, unlocks them, computes the gaps; `dp_attention` moves rows earlier
cache, publication    puts the row into the tree and makes donors of the computed chunks

Beside the way: `faults` counts exceptions, `pins` keeps prompts under a name, `auditor` is the audit's interface.
"""
