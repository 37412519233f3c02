"""A federation of real nodes: what travels (wire), the server's side (server), a node's (node), and
Flower's apps.
"""
