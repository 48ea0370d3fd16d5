# Written by `ringfence guard install`. Runs the client of a hook with the interpreter that ringfence has now.
# usage: PYTHON CLIENT COMMAND WORDS...: where they were at the installation, and what the client gets.
python=$1 client=$2 command=$3
shift 3
if ! [ -x "$python" ] && [ -r "$command" ]; then
    { IFS= read -r first; IFS= read -r second; } <"$command"
    case $first in
    '#!/bin/sh') second=${second#*\"} python=${second%%\"*} ;; # a path that is too long for the first line
    *) python=${first#??} ;;
    esac
fi
if ! [ -r "$client" ]; then
    for client in "${python%/bin/*}"/lib/python3*/site-packages/ringfence_guard/hook_client.py; do :; done
fi
if [ -x "$python" ] && [ -r "$client" ]; then
    # Imported, since Python keeps what it has compiled of a module, and compiles a program at each start.
    exec "$python" -I -S -c "import sys
sys.path.append(sys.argv.pop(1))
from hook_client import main
sys.exit(main(sys.argv[1:]))" "${client%/*}" "$@"
fi
event=$(cat)
case " $* " in *' --if-unavailable allow '*) exit 0 ;; esac
case $event in
*'"PreToolUse"'* | *'"BeforeTool"'* | *'"tool.execute.before"'*)
    echo "ringfence guard is not installed any more, so this call must not run: run \`ringfence guard install\` again." >&2
    exit 2
    ;;
esac
