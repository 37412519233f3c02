"""Play a federation of real nodes: messages (wire), the server's side, a node's, Flower's apps."""
