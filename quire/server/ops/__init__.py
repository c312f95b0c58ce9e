"""What operators look at: metrics, traces, the inspector, the page and the OpenAPI document."""
