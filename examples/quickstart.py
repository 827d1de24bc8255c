"""Evershard in fifteen lines: a cluster of three servers on this machine, a table, a crash, and nothing lost."""

import numpy as np

import evershard as es

with es.local(nodes=3) as cluster:  # or es.connect("http://10.0.0.1:7400,http://10.0.0.2:7400")
    items = cluster.create_table("items", dim=16, optimizer=es.SGD(lr=1.0), initializer=es.Zeros())
    ids = np.arange(1000)
    items.push(ids, np.ones((1000, 16)))  # returns when two of three servers have it
    cluster.kill_node(1)  # kill -9
    items.push(ids, np.ones((1000, 16)))  # goes on
    rows = items.pull(ids)  # float32[1000, 16]
    print("every push is there, once:", bool((rows == -2).all()))
