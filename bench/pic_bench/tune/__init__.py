"""The boldest settings whose loss stays within a budget, on an operator's own logs and model.

`ladder` has the settings from careful to most reuse and lets the census rank them; `sample` draws sessions, and of each
one call, and one behind a changed field; `climb` measures rung after rung through the passes of `fidelity`, on a server
of its own or one that is `running`; `verdict` judges the records by `bounds`; `report` writes the
page, the configuration and the certificate.
"""
