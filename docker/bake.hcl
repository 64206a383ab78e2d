# SPDX-License-Identifier: Apache-2.0
# What a release builds, attests and pushes (ci/publish_image). The values come from ci/matrix.json, through the environment:
#
#   env REPOSITORY=REGISTRY/NAME $(python3 ci/matrix.py --image) docker buildx bake --file docker/bake.hcl --push
#
# Images for aarch64 come from the same file, by `--machine aarch64` behind --image, on such a machine or under its
# emulation; none has been built.
#
# Attestations need a builder of the docker-container driver; sbom lists every package of base and image, provenance in
# mode max holds the build arguments, so no secret may ever be one.

variable "BASE_IMAGE" {}
variable "BASE_NAME" {}
variable "BASE_DIGEST" {}
variable "CUDA" {}
variable "NVSHMEM" {}
variable "ARCHS" {}
variable "VERSION" {}
variable "REVISION" {}
variable "CREATED" {}

variable "REPOSITORY" {
  default = "magi_attention"
}

# For which machine, and what its tags end with.
variable "PLATFORM" {
  default = "linux/amd64"
}

variable "SUFFIX" {
  default = ""
}

# The address of the sources, for a label.
variable "SOURCE" {
  default = ""
}

# Folder of the wheels, in the checkout.
variable "DIST" {
  default = "dist"
}

group "default" {
  targets = ["runtime", "test"]
}

target "_common" {
  context    = "."
  dockerfile = "docker/Dockerfile"
  platforms  = [PLATFORM]
  attest     = ["type=provenance,mode=max", "type=sbom"]
  args = {
    BASE_IMAGE  = BASE_IMAGE
    BASE_NAME   = BASE_NAME
    BASE_DIGEST = BASE_DIGEST
    CUDA        = CUDA
    NVSHMEM     = NVSHMEM
    ARCHS       = ARCHS
    VERSION     = VERSION
    REVISION    = REVISION
    CREATED     = CREATED
    SOURCE      = SOURCE
    DIST        = DIST
  }
}

target "runtime" {
  inherits = ["_common"]
  target   = "runtime"
  tags     = ["${REPOSITORY}:${VERSION}${SUFFIX}", "${REPOSITORY}:latest${SUFFIX}"]
}

target "test" {
  inherits = ["_common"]
  target   = "test"
  tags     = ["${REPOSITORY}:${VERSION}${SUFFIX}-test"]
}
