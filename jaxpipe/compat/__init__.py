"""Names and behaviour of other libraries: MaxText's pipelines, JaxPP's API."""
