"""The stations of a request on its way through the server, in order.

frontend, options     HTTP 400 for bad options
receive, modes        the request's options, its namespace and a `state`
admission             SGLang's `PrefillAdder`: plans the request, charges computed tokens only, counts in `account`
planning, rows        a plan (by `core`) and its locked donors, or a reason from `fallback`
forward, gap_batch    copies donors' rows, unlocks them, computes the gaps
tree, publish         insert the rows into the tree, and make donors of the computed chunks

Beside the way: `stations` is what they share, `faults` counts exceptions, `feature` is the protocol of features.
"""
