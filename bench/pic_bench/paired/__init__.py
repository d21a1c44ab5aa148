"""The experiment that decides which text may be spliced: all arms on the same prompts, exact hits, random choice.

cases.py    prompts with the requests before them whose rows they may take, by kind
forward.py  a forward pass over rows that anybody computed, in plain PyTorch
arms.py     which tokens an arm takes from which donor, and what it computes
measure.py  one case under all arms: a record each
table.py    paired differences with intervals, and the frontier of cost against loss
"""
