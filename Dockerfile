# Three images, tagged with SGLang's version and ours (`make images`):
#   server  SGLang's own image and the plugin's wheel; nothing that was in it has another version afterwards
#           docker run --gpus all --ipc=host -p 30000:30000 IMAGE sglang serve MODEL --host 0.0.0.0 --radix-cache-backend pic
#   gateway SGLang's gateway, smg, which sglang_pic/deploy starts before the servers
#   demo    the demo of the first page on a CPU; its report is in the folder that is mounted
#           docker run -v "$PWD/runs:/sglang-pic/runs" IMAGE
ARG SGLANG=0.5.23

FROM python:3.11-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY .ci/index_page.py .ci/
COPY sglang_pic sglang_pic
COPY kernels kernels
COPY traces traces
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.11-slim-bookworm AS demo
SHELL ["/bin/bash", "-eu", "-o", "pipefail", "-c"]
# Debian keeps one version of a package.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 demo \
    && install --directory --owner demo /sglang-pic
USER 1000
WORKDIR /sglang-pic
COPY --chown=demo . .
# TORCH_INDEX names an index with CPU builds of torch; without it the CUDA build is taken, which is larger and works too.
ARG TORCH_INDEX=""
RUN PIP_EXTRA_INDEX_URL="$TORCH_INDEX" PIP_NO_CACHE_DIR=1 make setup \
    && .venv/bin/sglang-pic model smollm2 .models/smollm2 \
    && mkdir runs
CMD ["make", "demo"]

FROM python:3.11-slim-bookworm AS gateway
RUN pip install --no-cache-dir smg==1.13.0 && smg --help
USER 1000

FROM lmsysorg/sglang:v${SGLANG} AS server
SHELL ["/bin/bash", "-eu", "-o", "pipefail", "-c"]
COPY --from=wheel /dist /tmp/dist
RUN pip freeze | sort > /tmp/before \
    && PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-cache-dir /tmp/dist/*.whl \
    && pip freeze | sort > /tmp/after \
    && if [ -n "$(comm -23 /tmp/before /tmp/after)" ]; then comm -3 /tmp/before /tmp/after; exit 1; fi \
    && sglang-pic --version \
    && rm -r /tmp/dist /tmp/before /tmp/after
# Plans' loops, for processors like that of the build, and for the superuser: whoever else starts a server compiles once.
RUN python3 -c "from sglang_pic.core import load_loops; assert load_loops()"
