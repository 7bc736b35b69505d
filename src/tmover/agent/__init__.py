"""`tmover run`: one per node, between the controller and the node's workers. Imports no torch."""
