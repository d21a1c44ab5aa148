"""What an operator watches: a Grafana board, Prometheus rules, and a compose file that starts both.

`python -c "import sglang_pic.monitoring as m; print(*m.__path__)"` names the folder.
"""

from __future__ import annotations
