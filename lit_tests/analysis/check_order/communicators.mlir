// What XLA:GPU opens before programs start, whether it runs or not: devices 0 and 1 run one program,
// 2 and 3 another. No device takes the last branch, and the loop has no iterations.

// RUN: stablehlo-tools check-order --target none %s %s | filecheck %s
// CHECK: ordered: 2 programs on devices 0 to 3

// One opens communicators that the other does not.
// RUN: sed '/%never/s/\[\[0, 1, 2, 3\]\]> : tensor<1x4xi64>/[[0, 2], [1, 3]]> : tensor<2x2xi64>/' %s > %t.more.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.more.mlir > %t.out
// RUN: filecheck %s --check-prefix=MISSING < %t.out
// RUN: not stablehlo-tools check-order --target none %s %t.more.mlir --json | filecheck %s --check-prefix=MISSING-JSON
// RUN: stablehlo-tools check-order --target none %t.more.mlir | filecheck %s --check-prefix=ONCE
// RUN: stablehlo-tools check-order --target none %t.more.mlir %t.more.mlir | filecheck %s
// MISSING: may-deadlock: XLA:GPU opens the communicator of devices 0 and 2 for all_reduce at {{.*}}more.mlir:{{.*}} before the program starts, even if it never runs. {{.*}}communicators.mlir, which runs on device 0, has no collective of these devices
// MISSING-NEXT: device 2 opens the communicator of devices 0 and 2 and waits for device 0 for ever
// MISSING-NEXT: not replayed: this may be a false alarm (see the page of check-order)
// MISSING-JSON: "rule": "communicator-missing"
// ONCE: ordered: 1 program on devices 0 to 3

// What the text alone says never to run, compilers delete.
// RUN: sed 's/\[\[0, 3\], \[1, 2\]\]> : tensor<2x2xi64>/[[0, 1, 2, 3]]> : tensor<1x4xi64>/' %s > %t.loop.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.loop.mlir | filecheck %s --check-prefix=OPEN
// OPEN: ordered unless a compiler rewrites all_reduce at {{.*}}: no barrier produces its operands
// OPEN-NEXT: try: stablehlo-tools check-order {{.*}} --target cpu

// Of one size: those of permutes and of others are apart, and are opened in the order of the text.
// RUN: sed '/%never/s/"stablehlo.all_reduce"/"stablehlo.collective_permute"/; /%never/s/replica_groups = dense<.*>}> (/source_target_pairs = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>}> (/; /%never/s/({.*}) :/:/' %s > %t.turned.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.turned.mlir > %t.out
// RUN: filecheck %s --check-prefix=ORDER < %t.out
// RUN: not stablehlo-tools check-order --target none %s %t.turned.mlir --json | filecheck %s --check-prefix=ORDER-JSON
// RUN: stablehlo-tools check-order --target none %t.turned.mlir %t.turned.mlir | filecheck %s
// ORDER: may-deadlock: XLA:GPU opens communicators of one size in program order, even if one of them is never used. Nothing shows that {{.*}}communicators.mlir and {{.*}}turned.mlir have all_reduce at {{.*}} and collective_permute at {{.*}} in the same order
// ORDER-NEXT: device 0 opens the communicator of devices 0 to 3 and waits for device 2
// ORDER-NEXT: device 2 opens the communicator of permutes of devices 0 to 3 and waits for device 0
// ORDER-JSON: "rule": "communicator-order"

// Split off a larger one, which all devices of that one must do, where the groups hold all of them.
// RUN: sed '/%half/d; s/return %result/return %moved/' %s > %t.whole.mlir
// RUN: not stablehlo-tools check-order --target none %s %t.whole.mlir > %t.out
// RUN: filecheck %s --check-prefix=SPLIT < %t.out
// RUN: not stablehlo-tools check-order --target none %s %t.whole.mlir --json | filecheck %s --check-prefix=SPLIT-JSON
// RUN: sed '/%half/s/\[\[0, 1\], \[2, 3\]\]> : tensor<2x2xi64>/[[0, 1]]> : tensor<1x2xi64>/' %s > %t.one.mlir
// RUN: not stablehlo-tools check-order --target none %t.one.mlir %t.whole.mlir | filecheck %s --check-prefix=OPEN
// SPLIT: may-deadlock: XLA:GPU splits the communicator of devices 0 and 1 for all_reduce at {{.*}}communicators.mlir:{{.*}} off the communicator of devices 0 to 3, and all of these devices must take part. But {{.*}}whole.mlir, which runs on device 2, has no collective of its group: {{.*}}--xla_gpu_enable_nccl_comm_splitting=false
// SPLIT-JSON: "rule": "communicator-split"
module attributes {mhlo.num_replicas = 4 : i32, mhlo.num_partitions = 1 : i32} {
  func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
    %id = stablehlo.replica_id : tensor<ui32>
    %two = stablehlo.constant dense<2> : tensor<ui32>
    %odd = stablehlo.remainder %id, %two : tensor<ui32>
    %index = stablehlo.convert %odd : (tensor<ui32>) -> tensor<i32>
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %w:2 = stablehlo.while(%i = %zero, %v = %x) : tensor<i32>, tensor<4xf32> cond {
      %c = stablehlo.compare LT, %i, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %one = stablehlo.constant dense<1> : tensor<i32>
      %next = stablehlo.add %i, %one : tensor<i32>
      %total = "stablehlo.all_reduce"(%v) <{replica_groups = dense<[[0, 3], [1, 2]]> : tensor<2x2xi64>}> ({ ^bb0(%a: tensor<f32>, %b: tensor<f32>): %s = stablehlo.add %a, %b : tensor<f32> stablehlo.return %s : tensor<f32> }) : (tensor<4xf32>) -> tensor<4xf32>
      stablehlo.return %next, %total : tensor<i32>, tensor<4xf32>
    }
    %y = "stablehlo.case"(%index) ({
      stablehlo.return %w#1 : tensor<4xf32>
    }, {
      %negated = stablehlo.negate %w#1 : tensor<4xf32>
      stablehlo.return %negated : tensor<4xf32>
    }, {
      %never = "stablehlo.all_reduce"(%w#1) <{replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}> ({ ^bb0(%a: tensor<f32>, %b: tensor<f32>): %s = stablehlo.add %a, %b : tensor<f32> stablehlo.return %s : tensor<f32> }) : (tensor<4xf32>) -> tensor<4xf32>
      %changed = stablehlo.cosine %never : tensor<4xf32>
      stablehlo.return %changed : tensor<4xf32>
    }) : (tensor<i32>) -> tensor<4xf32>
    %sum = "stablehlo.all_reduce"(%y) <{replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>}> ({ ^bb0(%a: tensor<f32>, %b: tensor<f32>): %s = stablehlo.add %a, %b : tensor<f32> stablehlo.return %s : tensor<f32> }) : (tensor<4xf32>) -> tensor<4xf32>
    %sine = stablehlo.sine %sum : tensor<4xf32>
    %permuted = "stablehlo.collective_permute"(%sine) <{source_target_pairs = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>}> : (tensor<4xf32>) -> tensor<4xf32>
    %moved = stablehlo.tanh %permuted : tensor<4xf32>
    %half = "stablehlo.all_reduce"(%moved) <{replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>}> ({ ^bb0(%a: tensor<f32>, %b: tensor<f32>): %s = stablehlo.add %a, %b : tensor<f32> stablehlo.return %s : tensor<f32> }) : (tensor<4xf32>) -> tensor<4xf32>
    %result = stablehlo.tanh %half : tensor<4xf32>
    return %result : tensor<4xf32>
  }
}
