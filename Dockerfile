# fedpfl and what it needs, as `make setup` installs it. Untried: no machine with Docker was at hand.
#   docker build -t fedpfl .
#   docker run --rm --gpus all -v "$PWD/outputs:/fedpfl/outputs" -v /data:/data fedpfl train method=fedobp device=cuda data_dir=/data
# On Linux pip's usual torch is the one for CUDA, which brings CUDA itself along; it runs on CPUs too.
# For the smaller one without CUDA, name the index that has it: --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.11-slim
ARG PIP_EXTRA_INDEX_URL=""
RUN apt-get update && apt-get install --yes --no-install-recommends make git && rm -rf /var/lib/apt/lists/*
WORKDIR /fedpfl
COPY . .
RUN PIP_EXTRA_INDEX_URL="$PIP_EXTRA_INDEX_URL" PIP_NO_CACHE_DIR=1 make setup PYTHON=python3
ENTRYPOINT ["/fedpfl/.venv/bin/fedpfl"]
CMD ["--help"]
