// The second program differs from the first in one collective.

// One that the other never issues.
// RUN: sed '/"stablehlo.collective_broadcast"/d; s/return %b/return %g/' %s > %t.less.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.less.mlir > %t.out
// RUN: filecheck %s --check-prefix=LESS < %t.out
// RUN: not stablehlo-tools check-order --target none %t.less.mlir %s > %t.out
// RUN: filecheck %s --check-prefix=EXTRA < %t.out
// RUN: not stablehlo-tools check-order --target none %s %t.less.mlir --json | filecheck %s --check-prefix=LESS-JSON
// LESS: mismatch: device 0 issues collective_broadcast tensor<4xf32> -> tensor<4xf32> ({{.*}}mismatches.mlir:[[PLACE:.*]]); its participant device 1 never does ({{.*}}less.mlir)
// LESS-NEXT: device 0 waits in collective_broadcast for device 1 for ever
// LESS-NOT: not replayed
// EXTRA: mismatch: device 1 issues collective_broadcast tensor<4xf32> -> tensor<4xf32> ({{.*}}mismatches.mlir:{{.*}}); its participant device 0 never does ({{.*}}less.mlir)
// LESS-JSON: "rule": "missing-collective"
// LESS-JSON: "what": "the end of the program"

// One that the other issues once, and this one twice.
// RUN: sed '/"stablehlo.collective_broadcast"/{p; s/%b/%c/; s/%g/%b/}; s/return %b/return %c/' %s > %t.twice.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.twice.mlir > %t.out
// RUN: filecheck %s --check-prefix=TWICE < %t.out
// TWICE: mismatch: device 1 issues collective_broadcast tensor<4xf32> -> tensor<4xf32> 2 times ({{.*}}twice.mlir:{{.*}}); its participant device 0 does {{.*}} ({{.*}}mismatches.mlir)

// Another kind.
// RUN: sed '/"stablehlo.collective_broadcast"/{s/broadcast/permute/; s/replica_groups/source_target_pairs/}' %s > %t.kind.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.kind.mlir > %t.out
// RUN: filecheck %s --check-prefix=KIND < %t.out
// RUN: not stablehlo-tools check-order --target none %s %t.kind.mlir --json | filecheck %s --check-prefix=KIND-JSON
// KIND: mismatch: device 0 issues collective_broadcast {{.*}}; its participant device 1 never does
// KIND-NEXT: device 0 waits in collective_broadcast for device 1 for ever
// KIND-NEXT: {{.*}}kind.mlir issues collective_permute tensor<4xf32> -> tensor<4xf32> pairs [(0, 1)] among [0, 1] at {{.*}}kind.mlir:
// KIND-JSON: "rule": "kind"

// Another element type.
// RUN: sed 's/f32/bf16/g' %s > %t.type.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.type.mlir --json | filecheck %s --check-prefix=TYPE
// TYPE: "rule": "element-type"

// Another shape.
// RUN: sed 's/4xf32/8xf32/g' %s > %t.shape.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.shape.mlir --json | filecheck %s --check-prefix=SHAPE
// SHAPE: "rule": "shape"

// Another reduction.
// RUN: sed 's/= stablehlo.add/= stablehlo.maximum/' %s > %t.reduction.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.reduction.mlir --json | filecheck %s --check-prefix=REDUCTION
// REDUCTION: "rule": "reduction-or-dimensions"

// Other groups: each for itself, and the same devices in another order.
// RUN: sed 's/dense<\[\[0, 1\]\]> : tensor<1x2xi64>/dense<[[0], [1]]> : tensor<2x1xi64>/' %s > %t.alone.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.alone.mlir --json | filecheck %s --check-prefix=ALONE
// RUN: sed 's/dense<\[\[0, 1\]\]>/dense<[[1, 0]]>/' %s > %t.order.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.order.mlir --json | filecheck %s --check-prefix=GROUPS
// ALONE: "verdict": "mismatch"
// ALONE: its participant device 1 never does
// GROUPS: "verdict": "mismatch"
// GROUPS: "rule": "groups"

// Other channel ids are no difference: the two do not say who meets whom.
// RUN: sed 's/handle = 1, type = 0/handle = 7, type = 0/' %s > %t.channel.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.channel.mlir | filecheck %s --check-prefix=CHANNEL
// CHANNEL: ordered unless a compiler rewrites
module attributes {mhlo.num_replicas = 2 : i32, mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
    %g = "stablehlo.all_reduce"(%x) ({
    ^bb0(%lhs: tensor<f32>, %rhs: tensor<f32>):
      %s = stablehlo.add %lhs, %rhs : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, use_global_device_ids,
      replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>
    } : (tensor<4xf32>) -> tensor<4xf32>
    %b = "stablehlo.collective_broadcast"(%g) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
    return %b : tensor<4xf32>
  }
}
