"""What everything consumes: the `Prediction`, how a posterior makes it, and the scores and metrics that read it."""
