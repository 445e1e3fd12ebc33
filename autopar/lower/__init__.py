"""Program x Plan -> one fx.GraphModule a stage. Knows neither threads nor processes."""
