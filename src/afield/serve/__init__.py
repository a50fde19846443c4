"""A calibrated model behind HTTP, and a page that shows what it answers, what it refuses and whether its data drifts.

    engine      what is served: arrays in, answers out     open_torch, open_onnx   from folders and files
    protocol    the Open Inference Protocol v2             invocations             as MLflow's servers have it
    batching    requests that arrive together              models                  names, versions, reload
    monitor     drift, recent answers, labels              metrics, logs           for Prometheus, as JSON
    app, infer  routes and errors                          server                  sockets and signals
    explain     training examples near an input            tracing                 for OpenTelemetry

A service of ONNX files never imports torch.
"""
