# For a machine with NVIDIA GPUs. Nobody has built this image yet. docs/devices.md has the commands.
FROM nvidia/cuda:13.0.2-runtime-ubuntu24.04
# Triton compiles a launcher for each kernel, so it needs a C compiler and the headers of Python.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /async-rl
COPY requirements-common.txt requirements.txt ./
RUN python3 -m venv .venv && .venv/bin/python -m pip install --no-cache-dir -r requirements.txt
COPY . .
ENV PATH=/async-rl/.venv/bin:$PATH PYTHONPATH=/async-rl
ENTRYPOINT ["bash"]
