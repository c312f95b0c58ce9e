"""`python -m quire.engine.process FILENO PARENT_PID`: started by the supervisor and by nobody else."""

import sys

from quire.engine.process.host import main

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
