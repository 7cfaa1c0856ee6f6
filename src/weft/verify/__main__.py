"""`python -m weft.verify request.json`: one launched rank of a verification."""

from weft.core.quiet import quiet_libraries

quiet_libraries()  # before anything imports the libraries that chat while being imported

from weft.verify.worker import main  # noqa: E402

main()
