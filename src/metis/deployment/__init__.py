"""The wall clock: one controller and learners that dial out to it, over gRPC. The only package that imports grpc."""
