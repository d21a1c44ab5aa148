"""The boldest settings whose loss stays within a budget, on an operator's own logs and model.

`ladder` has the settings from careful to most reuse and lets the census rank them; `sample` draws sessions, and of each
one call; `climb` measures rung after rung through the passes of `fidelity`; `verdict` judges the records by `bounds`;
`report` writes the page, the configuration and the certificate.
"""
