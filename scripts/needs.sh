# What a GPU needs of a machine beside its driver; install.sh and gpu_check.sh source this.

what_is_missing() { # PYTHON: a line for each thing that is missing, with what brings it
    local python=$1 compiler headers
    compiler=${CC:-$(command -v gcc || command -v clang || true)}
    # Triton compiles a launcher for each kernel, in the trainer and in engines.
    if [ -z "$compiler" ] || ! command -v "$compiler" >/dev/null; then
        echo "there is no C compiler${CC:+ $CC}, which Triton's kernels need: apt-get install build-essential, or set CC"
    fi
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
    if [ ! -f "$headers/Python.h" ]; then
        echo "$headers has no Python.h, which Triton's kernels need: apt-get install python3-dev"
    fi
}

warn_of_shared_memory() { # NAME of who warns: Docker's 64 MB are too few for NCCL and for engines of several GPUs
    local free
    free=$(df -k --output=avail "${SHARED_MEMORY:-/dev/shm}" 2>/dev/null | tail -n 1) || true
    if [ "${free:-0}" -lt $((1 << 20)) ]; then
        echo "$1: warning: less than 1 GiB is free in /dev/shm, where NCCL and engines of several GPUs exchange data:" \
            "start the container with --shm-size 8g, or --ipc host"
    fi
}
