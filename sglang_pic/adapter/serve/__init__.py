"""One request on its way through the server, in the order of these modules.

frontend, options            HTTP: bad options are refused
scheduler, state             the request gets its options, its namespace and a state of ours
admission                    SGLang considers the request for the next batch
planning, resolver           why it is not reused, or what is spliced from which locked donors
accounting, fallback         what was admitted is counted
forward, gap_batch           donors' rows are moved, the gaps are computed; observers watch
cache, publication           the row goes into the tree, and what was computed becomes a donor
pins                         a prompt's rows stay there under a name
auditor                      what all of them ask of the live audit
"""
