"""Watch memory: graphs of earlier steps that stay alive, evaluations with a graph, growth and fragmentation."""
