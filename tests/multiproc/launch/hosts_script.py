"""The launcher of several hosts in a process of its own. Usage: hosts_script.py JSON, the fields of a HostsRequest.

`hosts` is a list as on the command line. Prints the lines for the user and the error on stderr.
"""

import json
import sys
from pathlib import Path

from weft.core.errors import WeftError
from weft.launch.host_list import read_hosts
from weft.launch.hosts import launch_hosts
from weft.launch.hosts_request import HostsRequest

fields = json.loads(sys.argv[1])
fields["hosts"] = read_hosts(fields["hosts"])
if "folder" in fields:
    fields["folder"] = Path(fields["folder"])
for name in ("command", "program", "ssh", "ssh_options"):
    if name in fields:
        fields[name] = tuple(fields[name])
try:
    launch_hosts(HostsRequest(**fields))
except WeftError as error:
    print(f"error [{error.code}]: {error.message}", file=sys.stderr)
    sys.exit(error.exit_code)
