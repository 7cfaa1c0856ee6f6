"""`weft ui`: a local web page over a folder of runs. It reads run folders and changes nothing in them.

Metrics are kept as rows of numbers in the user's cache (`index`), thinned per pixel (`thinning`) and sent by a server
on the loopback interface (`server`). Reports and plans are those of `weft.report` and `weft.plan`. No torch.
"""
