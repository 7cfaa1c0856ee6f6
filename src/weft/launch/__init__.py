"""Starting ranks: on this machine (`local`). It trains nothing; a rank's own side is `weft.train.ranks.process`."""
