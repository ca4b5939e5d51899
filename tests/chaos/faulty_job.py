"""A job like train_async.py of which one part is broken: `torchrun tests/chaos/faulty_job.py FAULT [options]`."""

from chaos.faulty_parts import main

if __name__ == "__main__":
    main()
