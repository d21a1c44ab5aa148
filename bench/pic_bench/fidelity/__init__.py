"""How far answers after splicing are from a full prefill: a trace through the real server, records, a report.

`runner` serves the `passes` of every trace by requests of `target`, each under one of the `arms`: calls in order on a
cache that lives on. `measure` makes a record of the logits of each request by `metrics`, in the folder that `config`
describes. `compared` makes the cells of `summary`, which `report` shows. `cases` are the prompts of `pic_bench.paired`.
"""
