"""`python -m quire.engine.process FILENO PARENT_PID [json-logs]`:
started by the supervisor alone."""

import sys

from quire.engine.process.host import main
from quire.engine.process.messages import JSON_LOGS

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), has_json_logs=JSON_LOGS in sys.argv[3:]))
